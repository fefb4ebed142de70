"""The base class of orders, and those that are one heap.

In most orders a request's key is known on entry and never changes, so a heap suffices. Ageing
needs no timer either: when priority grows linearly with waiting time, the order of two requests is
the same at any time.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.registry import within
from actors.scheduling.state import RequestState, RequestStatus

_MAX_NAMES = 4096  # tenants whose mean is remembered


class Order(ABC):
    """Holds WAITING requests and chooses the next.

    `order_key` (smaller is earlier) is set on entry and decides, among running requests, which is
    planned first and which is preempted last. Requests that leave by abort just change status;
    orders skip those that are no longer WAITING.
    """

    follows_service = False  # whether `admit`, `serve` and `finish` must be called
    preempts = False  # whether the next request may replace a running one of a worse key

    @abstractmethod
    def push(self, state: RequestState, now_s: float) -> None:
        """Add a new request, and set its key."""

    @abstractmethod
    def adopt(self, state: RequestState) -> None:
        """Set the key of a request that is not pushed: of a running one after a switch of the
        order, or of a suspect."""

    @abstractmethod
    def restore(self, state: RequestState, now_s: float) -> None:
        """Add a request that comes back (preempted, or set aside) before those of equal key."""

    @abstractmethod
    def peek(self, now_s: float) -> RequestState | None:
        """The next request; None when none waits."""

    @abstractmethod
    def pop(self) -> RequestState:
        """Remove and return the request that the last `peek` returned."""

    @abstractmethod
    def drain(self) -> list[RequestState]:
        """Remove all waiting requests, best first, for a switch of the order."""

    # ---- hooks for orders whose keys change with service --------------------------------

    def admit(self, state: RequestState) -> None:  # noqa: B027  # an optional hook
        """The popped request starts for the first time."""

    def serve(self, states: Sequence[RequestState]) -> None:  # noqa: B027
        """Each of these requests has got an output token."""

    def charge(self, num_tokens: Mapping[RequestState, int]) -> None:  # noqa: B027
        """A step computes so many tokens of these requests, prompts included.

        Called by policies that preempt by order.
        """

    def finish(self, state: RequestState) -> None:  # noqa: B027
        """The request has finished (not called for aborts)."""

    def rerank(self, running: Iterable[RequestState], now_s: float) -> bool:
        """Change keys of running requests by the service they got; returns whether any changed.

        Called by policies that preempt by order.
        """
        return False


class HeapOrder(Order):
    """Subclasses define `value`; ties are ordered by submission."""

    def __init__(self, config: SchedulerConfig) -> None:
        # (key on entry, entry number, request); an entry counts while key and status still match
        self._heap: list[tuple[tuple[float, int], int, RequestState]] = []
        self._num_entries = 0

    def value(self, state: RequestState) -> float:
        """Smaller is served earlier."""
        raise TypeError(f"{type(self).__name__} defines no value")

    def push(self, state: RequestState, now_s: float) -> None:
        self.adopt(state)
        self._enter(state)

    def adopt(self, state: RequestState) -> None:
        state.order_key = (self.value(state), state.sequence_number)

    def restore(self, state: RequestState, now_s: float) -> None:
        self._enter(state)

    def _enter(self, state: RequestState) -> None:
        self._num_entries += 1
        heapq.heappush(self._heap, (state.order_key, self._num_entries, state))

    def peek(self, now_s: float) -> RequestState | None:
        heap = self._heap
        while heap:
            order_key, _, state = heap[0]
            if state.status is RequestStatus.WAITING and state.order_key == order_key:
                return state
            heapq.heappop(heap)
        return None

    def pop(self) -> RequestState:
        return heapq.heappop(self._heap)[2]

    def drain(self) -> list[RequestState]:
        waiting = [
            state
            for order_key, _, state in sorted(self._heap)
            if state.status is RequestStatus.WAITING and state.order_key == order_key
        ]
        self._heap.clear()
        return list(dict.fromkeys(waiting))


class FirstComeFirstServed(HeapOrder):
    """By arrival (a replayed request keeps its arrival)."""

    def value(self, state: RequestState) -> float:
        return state.request.arrival_s


class PriorityWithAgeing(HeapOrder):
    """One class of priority is worth `ageing_s` seconds of waiting.

    A request of class p overtakes one of class q < p only if it arrives less than
    (p - q) * ageing_s later, which bounds every wait.
    """

    def __init__(self, config: SchedulerConfig, ageing_s: float = 10.0) -> None:
        super().__init__(config)
        within(0, 1e9, ageing_s=ageing_s)
        self.ageing_s = ageing_s

    def value(self, state: RequestState) -> float:
        return state.request.arrival_s - state.request.priority * self.ageing_s


class ShortestOutput(HeapOrder):
    """By expected output length; a second of waiting is worth `ageing_tokens_per_s` tokens.

    The expectation is the declared `max_tokens`, or with `predict` the tenant's running mean
    of finished lengths where that is smaller.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        ageing_tokens_per_s: float = 10.0,
        predict: bool = False,
        memory: float = 0.9,
    ) -> None:
        super().__init__(config)
        within(0, 1e9, ageing_tokens_per_s=ageing_tokens_per_s)
        within(0, 1, memory=memory)
        self.ageing_tokens_per_s = ageing_tokens_per_s
        self.predict = self.follows_service = predict
        self.memory = memory  # weight of earlier lengths in the running mean
        self.means: dict[str, float] = {}

    def value(self, state: RequestState) -> float:
        request = state.request
        expected = float(request.sampling.max_tokens - len(request.output))
        if self.predict and request.tenant in self.means:
            expected = min(expected, self.means[request.tenant])
        return expected + request.arrival_s * self.ageing_tokens_per_s

    def finish(self, state: RequestState) -> None:
        tenant, length = state.request.tenant, float(state.num_output_tokens)
        mean = self.means.pop(tenant, length)
        if len(self.means) >= _MAX_NAMES:  # clients choose the names: drop the least recent
            del self.means[next(iter(self.means))]
        self.means[tenant] = self.memory * mean + (1 - self.memory) * length
