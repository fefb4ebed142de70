"""Requests of one group share one prompt (n > 1), which is computed once, then referenced.

The first member is the leader; the others are held back until its prompt is computed, and then
share the blocks of a member that still holds them. A group whose leader ends gets another one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from actors.scheduling.state import RequestState, RequestStatus


@dataclass(slots=True)
class _Group:
    held: deque[RequestState] = field(default_factory=deque)  # WAITING outside the queue
    ready: list[RequestState] = field(default_factory=list)  # RUNNING, prompt computed
    leader: RequestState | None = None  # computes the prompt for those held back
    num_members: int = 0
    has_started: bool = False


class Groups:
    """Groups by name; members but the first are held back until the prompt is computed."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, name: str | None) -> bool:
        return name in self._groups

    def started(self, name: str) -> None:
        """Record that a member has started for the first time."""
        if name in self._groups:
            self._groups[name].has_started = True

    def have_started(self, name: str | None) -> bool:
        """Whether a member of this group has started: its client may read output already."""
        return name in self._groups and self._groups[name].has_started

    def join(self, state: RequestState) -> bool:
        """Add a new request of a group. False: it is held back for the leader."""
        key = state.request.group
        if key is None:
            return True
        group = self._groups.setdefault(key, _Group())
        group.num_members += 1
        if group.leader is None and not group.ready:
            group.leader = state
        elif group.leader is not None and not group.ready and state.suspicion is None:
            group.held.append(state)
            return False
        return True

    def prompt_done(self, state: RequestState) -> list[RequestState]:
        """Record that a member's prompt is computed; returns those that may enter the queue."""
        key = state.request.group
        if key is None or key not in self._groups:
            return []
        group = self._groups[key]
        if state not in group.ready:
            group.ready.append(state)
        return self._let_in(group)

    def _let_in(self, group: _Group) -> list[RequestState]:
        entering = [member for member in group.held if member.status is RequestStatus.WAITING]
        group.held.clear()
        return entering

    def vacated(self, state: RequestState) -> None:
        """Record that a member's blocks are freed, or not reliable."""
        key = state.request.group
        if key is not None and key in self._groups and state in self._groups[key].ready:
            self._groups[key].ready.remove(state)

    def ended(self, state: RequestState) -> list[RequestState]:
        """Remove an ended member; returns the new leader, if one must enter the queue."""
        key = state.request.group
        if key is None or key not in self._groups:
            return []
        self.vacated(state)
        group = self._groups[key]
        group.num_members -= 1
        if group.num_members == 0:
            del self._groups[key]
        if group.leader is state:
            group.leader = None
        while group.leader is None and group.held:
            heir = group.held.popleft()
            if heir.status is RequestStatus.WAITING:
                group.leader = heir
                return [heir]
        return []

    def donor(self, state: RequestState) -> RequestState | None:
        """A running member of the same group with a computed prompt."""
        key = state.request.group
        if key is None or key not in self._groups or state.request.pooling is not None:
            return None
        request = state.request
        for member in self._groups[key].ready:
            other = member.request
            if (
                other.prompt == request.prompt
                and other.cache_salt == request.cache_salt
                and (
                    request.sampling.prompt_logprobs is None
                    or len(member.prompt_logprobs) == member.num_prompt_tokens
                )
            ):
                return member
        return None
