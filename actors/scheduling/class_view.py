"""The engine as it would be without its background requests, or with these alone, or without some
that wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from actors.scheduling.interfaces import EngineView, StepView
from actors.scheduling.queue.waiting import WaitingQueue
from actors.scheduling.state import RequestState


class BothClasses(EngineView, Protocol):
    """The engine with all its requests: `lifecycle.LiveRequests`."""

    waiting: WaitingQueue

    @property
    def decoding(self) -> Sequence[RequestState]: ...
    @property
    def prefilling(self) -> Sequence[RequestState]: ...
    @property
    def queue(self) -> Sequence[RequestState]: ...
    def head(self) -> RequestState | None: ...
    def cap_of(self, tenant: str, is_background: bool | None = None) -> tuple[int | None, int]: ...


class ClassView:
    """Implements `interfaces.EngineView` for some of the requests; valid for one planning.

    Memory, steps in flight and what was counted or measured are the engine's.
    """

    def __init__(
        self,
        requests: BothClasses,
        is_background: bool | None,
        num_held: int = 0,
        num_held_tokens: int = 0,
    ) -> None:
        """is_background: its requests are those of the background (`Request.priority`); None: all.
        num_held: of those that wait, so many, of that many tokens, do not count."""
        self._requests = requests
        self._class = is_background
        self.is_background = requests.is_background if is_background is None else is_background
        self._num_held, self._num_held_tokens = num_held, num_held_tokens
        self.now_s = requests.now_s
        self.num_arrived = requests.num_arrived
        self.num_adapter_loads = requests.num_adapter_loads
        self.tokens_per_s = requests.tokens_per_s
        self.num_blocks = requests.num_blocks
        self.block_size = requests.block_size
        self.in_flight: Sequence[StepView] = requests.in_flight
        self.backlogged = requests.backlogged

    def _of_class(self, states: Sequence[RequestState]) -> Sequence[RequestState]:
        kind = self._class
        return states if kind is None else [s for s in states if s.is_background is kind]

    @property
    def decoding(self) -> Sequence[RequestState]:
        return self._of_class(self._requests.decoding)

    @property
    def prefilling(self) -> Sequence[RequestState]:
        return self._of_class(self._requests.prefilling)

    @property
    def queue(self) -> Sequence[RequestState]:
        return self._of_class(self._requests.queue)[: self.num_waiting]

    @property
    def num_waiting(self) -> int:
        waiting, held = self._requests.waiting, self._num_held
        if self._class is None:
            return waiting.num_requests - held
        num = waiting.num_background
        return (num if self._class else waiting.num_requests - num) - held

    @property
    def num_waiting_tokens(self) -> int:
        waiting, held = self._requests.waiting, self._num_held_tokens
        if self._class is None:
            return waiting.num_tokens - held
        num = waiting.num_background_tokens
        return (num if self._class else waiting.num_tokens - num) - held

    @property
    def num_shared_tokens(self) -> int:
        waiting = self._requests.waiting
        num = waiting.num_background_shared
        if self._class is None:
            return waiting.num_shared_tokens
        return num if self._class else waiting.num_shared_tokens - num

    def head(self) -> RequestState | None:
        """The next request to start of all, if it is one of them."""
        state = self._requests.head()
        is_one = state is not None and self._class in (None, state.is_background)
        return state if is_one else None

    def found_by(self, priority: int, tenant: str | None = None) -> EngineView:
        return self._requests.found_by(priority, tenant)

    def knows(self, request_id: int) -> bool:
        return self._requests.knows(request_id)

    def num_waiting_of(self, tenant: str) -> int:
        return self._requests.num_waiting_of(tenant)

    def cap_of(self, tenant: str) -> tuple[int | None, int]:
        return self._requests.cap_of(tenant, self._class)

    def num_held_of(self, request_id: int) -> int:
        return self._requests.num_held_of(request_id)

    @property
    def num_free_blocks(self) -> int:
        return self._requests.num_free_blocks

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)
