"""Two instances of one order: live requests are in one, those of the background in the other.

It is for orders whose keys do not tell how long a request has waited, and that neither preempt nor
learn from what has finished: `charge`, `rerank` and `finish` are not passed on.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.queue.order import Order
from actors.scheduling.state import RequestState


class YieldingOrder(Order):
    """The next background request goes before the next live one only if that has come by more
    than the seconds later that its priority stands for (`Request.counts_from_s`)."""

    def __init__(self, live: Order, background: Order) -> None:
        self.live = live
        self.background = background
        self.follows_service = live.follows_service
        self._next = live  # of which the last peek returned the head

    def _of(self, state: RequestState) -> Order:
        return self.background if state.is_background else self.live

    def goes_before(self, state: RequestState, other: RequestState) -> bool:
        if state.is_background is other.is_background:
            return state.order_key < other.order_key
        return state.request.counts_from_s < other.request.counts_from_s

    def place(self, state: RequestState) -> tuple[bool, tuple[float, int]]:
        return state.is_background, state.order_key

    def use(self, config: SchedulerConfig) -> None:
        self.live.use(config)
        self.background.use(config)

    def push(self, state: RequestState, now_s: float) -> None:
        self._of(state).push(state, now_s)

    def adopt(self, state: RequestState) -> None:
        self._of(state).adopt(state)

    def restore(self, state: RequestState, now_s: float) -> None:
        self._of(state).restore(state, now_s)

    def peek(self, now_s: float) -> RequestState | None:
        live, background = self.live.peek(now_s), self.background.peek(now_s)
        if live is None or (background is not None and self.goes_before(background, live)):
            self._next = self.background
            return background
        self._next = self.live
        return live

    def pop(self) -> RequestState:
        return self._next.pop()

    def set_aside(self) -> RequestState:
        return self._next.set_aside()

    def remove(self, state: RequestState) -> None:
        self._of(state).remove(state)

    def drain(self) -> list[RequestState]:
        return self.live.drain() + self.background.drain()

    def admit(self, state: RequestState) -> None:
        self._of(state).admit(state)

    def serve(self, states: Sequence[RequestState]) -> None:
        live = [state for state in states if not state.is_background]
        self.live.serve(live)
        if len(live) < len(states):
            self.background.serve([state for state in states if state.is_background])
