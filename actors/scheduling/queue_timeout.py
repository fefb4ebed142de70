"""Refuses requests that have waited too long, and requests a Tick for the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, takewhile
from operator import itemgetter

from actors.scheduling.events import Instruction, Refuse, WakeAt
from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.state import RequestState, RequestStatus

_FEW = 64


class QueueTimeout:
    """Watches requests that have never started, by the setting `queue_timeout_s`.

    A replayed one that has waited too long when it comes may wait once more, as long as a place is
    free: its engine was lost, and many like it come at once, of which a step has room for few.
    """

    def __init__(self, requests: LiveRequests) -> None:
        self._requests = requests
        self._arrivals: deque[tuple[float, RequestState]] = deque()
        self._late: deque[tuple[int, RequestState]] = deque()  # by the first step it may be in
        self._newest = 0  # sequence number of the last one that is watched
        self._wake_at_s: float | None = None  # time of the requested Tick

    def woken(self) -> None:
        """Note that the requested Tick has come."""
        self._wake_at_s = None

    def expire(self, num_steps: int) -> list[Instruction]:
        """Refuse overdue requests, and request a Tick for the next one. num_steps: planned."""
        timeout_s = self._requests.config.queue_timeout_s
        if timeout_s is None:
            return []
        out: list[Instruction] = []
        for state in chain(self._overdue(timeout_s), self._crowded_out(num_steps)):
            self._requests.drop_waiting(state)
            message = f"waited {timeout_s} s without starting"
            out.append(Refuse(state.request_id, message, None, 1.0, has_waited=True))
        self._watch_new(timeout_s, num_steps)
        if self._arrivals and (wake_at_s := self._arrivals[0][0] + timeout_s) != self._wake_at_s:
            self._wake_at_s = wake_at_s
            out.append(WakeAt(wake_at_s))
        return out

    def _watch_new(self, timeout_s: float, num_steps: int) -> None:
        """The request of this event, or all that came while there was no such setting."""
        newest_first = reversed(self._requests.by_id.values())
        fresh = list(takewhile(lambda s: s.sequence_number > self._newest, newest_first))
        if not fresh:
            return
        self._newest = fresh[0].sequence_number
        if len(fresh) == 1 and not fresh[0].request.is_replayed:
            self._arrivals.append((self._requests.now_s, fresh[0]))
        else:
            arrived, now_s = [], self._requests.now_s
            for state in fresh:
                if self._is_settled(state):
                    continue
                is_late = state.request.is_replayed and state.request.arrival_s + timeout_s <= now_s
                arrived.append((now_s if is_late else state.request.arrival_s, state))
                if is_late:
                    self._late.append((num_steps, state))
            self._arrivals = deque(sorted([*self._arrivals, *arrived], key=itemgetter(0)))
        if len(self._arrivals) > 2 * self._requests.num_waiting + _FEW:  # else all would be kept
            self._arrivals = deque([one for one in self._arrivals if not self._is_settled(one[1])])

    def _overdue(self, timeout_s: float) -> Iterator[RequestState]:
        """Remove from the arrivals overdue requests, and those that have started or ended."""
        arrivals, now_s = self._arrivals, self._requests.now_s
        while arrivals:
            arrived_s, state = arrivals[0]
            is_settled = self._is_settled(state)
            if not is_settled and arrived_s + timeout_s > now_s:
                return
            arrivals.popleft()
            if not is_settled and self._never_ran(state):
                yield state

    def _crowded_out(self, num_steps: int) -> Iterator[RequestState]:
        """Remove from the late ones those that had their chance, where no place is free."""
        late, requests = self._late, self._requests
        is_full = requests.running.num_slots_taken >= requests.config.max_requests
        in_flight = requests.in_flight
        first_open = in_flight[0].plan.step_id if in_flight else num_steps
        while late:
            first_step, state = late[0]
            is_settled = self._is_settled(state)
            if not is_settled and not (is_full and first_step < first_open):
                return
            late.popleft()
            if not is_settled and self._never_ran(state):
                yield state

    @staticmethod
    def _never_ran(state: RequestState) -> bool:
        return state.status is RequestStatus.WAITING and not state.output_token_ids

    def _is_settled(self, state: RequestState) -> bool:
        """Whether it has started or ended, or another of its group has started, whose stream a
        refusal would end too."""
        if state.admitted or state.request.has_started or state.status is RequestStatus.ENDED:
            return True
        return self._requests.waiting.groups.have_started(state.request.group)
