"""Fair sharing between tenants by virtual token counters (Sheng et al., OSDI '24, algorithm 2).

Each tenant's counter grows with the weighted tokens it is served: its prompts when they start,
its output tokens as they come. The next request is of the waiting tenant with the smallest
counter. The counter of a tenant that was idle is raised to the smallest active counter, so that
idling gives no credit.

Bound (theorem 4.4, weights 1): while two tenants both wait, their service differs by at most
2 * max(prompt_weight * longest prompt, output_weight * most output tokens resident at once).

A tenant whose requests are set aside is not idle: it keeps its counter, to which nobody is raised
while none of its requests is in the order. Its cap may keep it behind for as long as it waits, so
its counter is raised when one comes or returns, but to no less credit than the bound of the longest
requests.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.queue.order import Order
from actors.scheduling.registry import within
from actors.scheduling.state import RequestState, RequestStatus

_MAX_NAMES = 4096  # with more, counters that have no effect are dropped


class VirtualTokenCounter(Order):
    """Tenants share the engine in proportion to `weights` (default: 1)."""

    follows_service = True

    def __init__(
        self,
        config: SchedulerConfig,
        weights: Mapping[str, float] | None = None,
        prompt_weight: float = 1.0,
        output_weight: float = 2.0,
    ) -> None:
        within(1e-9, 1e9, **(weights or {}))
        within(0, 1e9, prompt_weight=prompt_weight, output_weight=output_weight)
        self.weights = dict(weights or {})
        self.prompt_weight = prompt_weight
        self.output_weight = output_weight
        self.counters: dict[str, float] = {}
        self.use(config)
        # Waiting requests by tenant; a dictionary, as any of them may leave
        self._queues: dict[str, OrderedDict[RequestState, None]] = {}
        self._aside: dict[str, set[RequestState]] = {}  # those that are set aside
        # (counter, tenant), once for every tenant in _listed (all that wait); counters only grow,
        # so an outdated entry is too small and is corrected when it reaches the top
        self._heap: list[tuple[float, str]] = []
        self._listed: set[str] = set()
        self._last_counter = 0.0  # counter of the tenant whose queue emptied last
        self._next = ""  # tenant found by the last peek

    def push(self, state: RequestState, now_s: float) -> None:
        tenant = state.request.tenant
        self.adopt(state)
        if tenant not in self._queues:
            floor = self._floor()
            if len(self.counters) >= _MAX_NAMES:
                self._forget(floor)
            self._raise(tenant, floor)
        self._enter(tenant)[state] = None

    def use(self, config: SchedulerConfig) -> None:
        most_output = config.max_running_per_tenant or config.max_requests
        most = max(self.prompt_weight, self.output_weight * most_output)
        self._most_credit = 2 * config.max_model_len * most

    def _raise(self, tenant: str, floor: float) -> None:
        if tenant in self._aside:
            floor -= self._most_credit / self.weights.get(tenant, 1.0)
        self.counters[tenant] = max(self.counters.get(tenant, 0.0), floor)

    def _forget(self, floor: float) -> None:
        """Drop the counters that would be raised to the floor anyway, because clients without keys
        choose tenant names freely."""
        self.counters = {
            tenant: counter
            for tenant, counter in self.counters.items()
            if counter > floor or tenant in self._listed or tenant in self._aside
        }

    def adopt(self, state: RequestState) -> None:
        state.order_key = (state.request.counts_from_s, state.sequence_number)

    def restore(self, state: RequestState, now_s: float) -> None:
        tenant = state.request.tenant
        self._known(tenant)
        if tenant in self._aside and tenant not in self._queues:
            self._raise(tenant, self._floor())
        self._returned(state)
        queue = self._enter(tenant)
        queue[state] = None
        queue.move_to_end(state, last=False)

    def set_aside(self) -> RequestState:
        last_counter = self._last_counter
        state = self.pop()
        self._last_counter = last_counter  # its tenant has not left
        self._aside.setdefault(state.request.tenant, set()).add(state)
        return state

    def remove(self, state: RequestState) -> None:
        self._returned(state)
        self._queues.get(state.request.tenant, OrderedDict()).pop(state, None)

    def _returned(self, state: RequestState) -> None:
        aside = self._aside.get(state.request.tenant)
        if aside is not None:
            aside.discard(state)
            if not aside:
                del self._aside[state.request.tenant]

    def _enter(self, tenant: str) -> OrderedDict[RequestState, None]:
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = OrderedDict()
            if tenant not in self._listed:
                self._listed.add(tenant)
                heapq.heappush(self._heap, (self.counters[tenant], tenant))
        return queue

    def _least_counter(self) -> float | None:
        """Smallest counter among waiting tenants; brings the heap's top up to date."""
        heap = self._heap
        while heap:
            counter, tenant = heap[0]
            queue = self._queues.get(tenant)
            while queue and next(iter(queue)).status is not RequestStatus.WAITING:
                queue.popitem(last=False)
            if not queue:
                heapq.heappop(heap)
                self._listed.discard(tenant)
                if self._queues.pop(tenant, None) is not None:
                    self._last_counter = self.counters[tenant]
            elif self.counters[tenant] != counter:
                heapq.heapreplace(heap, (self.counters[tenant], tenant))
            else:
                return counter
        return None

    def peek(self, now_s: float) -> RequestState | None:
        if self._least_counter() is None:
            return None
        self._next = self._heap[0][1]
        return next(iter(self._queues[self._next]))

    def pop(self) -> RequestState:
        tenant = self._next
        queue = self._queues[tenant]
        state, _ = queue.popitem(last=False)
        if not queue:
            del self._queues[tenant]
            self._last_counter = self.counters[tenant]
        return state

    def admit(self, state: RequestState) -> None:
        tenant = state.request.tenant
        self._charge(tenant, self.prompt_weight * state.num_prompt_tokens)
        if tenant not in self._queues:
            self._last_counter = self.counters[tenant]

    def serve(self, states: Sequence[RequestState]) -> None:
        for state in states:
            self._charge(state.request.tenant, self.output_weight)

    def _charge(self, tenant: str, cost: float) -> None:
        self.counters[tenant] = self._known(tenant) + cost / self.weights.get(tenant, 1.0)

    def _known(self, tenant: str) -> float:
        """Its counter. One that was forgotten while its requests ran begins at the floor, or
        all that are known would wait until it has caught up."""
        if tenant not in self.counters:
            self.counters[tenant] = self._floor()
        return self.counters[tenant]

    def _floor(self) -> float:
        """What the counter of a tenant that begins to wait is raised to."""
        least = self._least_counter()
        return self._last_counter if least is None else least

    def drain(self) -> list[RequestState]:
        waiting: list[RequestState] = []
        while (state := self.peek(0.0)) is not None:
            self._queues[self._next].popitem(last=False)
            waiting.append(state)
        return waiting
