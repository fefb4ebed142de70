"""The waiting queue: its order, what is set aside, and how much of it there is."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.queue.groups import Groups
from actors.scheduling.queue.order import Order
from actors.scheduling.state import RequestState, RequestStatus

_by_rank = attrgetter("rank")


class WaitingQueue:
    """WAITING requests are in the order, parked, held by their group, or suspects to be tried."""

    def __init__(self, config: SchedulerConfig, order: Order) -> None:
        self.config = config
        self.order = order
        self.groups = Groups()
        self.num_requests = 0
        self.num_tokens = 0  # known tokens of the waiting: prompts, and outputs to be recomputed
        self.waiting_of: dict[str, int] = defaultdict(int)  # waiting requests of a tenant
        self.running_of: dict[str, int] = defaultdict(int)  # running requests of a tenant
        # Set aside, best rank first: their tenant is at its cap
        self.parked: dict[str, list[RequestState]] = {}

    def add(self, state: RequestState, now_s: float) -> None:
        """A new request waits."""
        self._count(state, 1)
        enters = state.request.group is None or self.groups.join(state)
        if state.suspicion is not None:  # its trial starts it
            self.order.adopt(state)
        elif enters:
            self.order.push(state, now_s)

    def restore(self, state: RequestState, now_s: float) -> None:
        """A request that ran waits again, before its peers; a suspect for its trial."""
        self._count(state, 1)
        if state.suspicion is None:
            self.order.restore(state, now_s)

    def remove(self, state: RequestState) -> None:
        """A waiting request is over. Orders skip it by its status."""
        self._count(state, -1)

    def _count(self, state: RequestState, sign: int) -> None:
        tenant = state.request.tenant
        self.num_requests += sign
        self.num_tokens += sign * state.num_tokens
        self.waiting_of[tenant] += sign
        if self.waiting_of[tenant] == 0:
            del self.waiting_of[tenant]

    # ---- the next to start --------------------------------------------------------------

    def head(self, now_s: float) -> RequestState | None:
        """The next to start, those of tenants at their cap set aside."""
        cap = self.config.max_running_per_tenant
        while True:
            state = self.order.peek(now_s)
            if state is None or cap is None:
                return state
            if self.running_of.get(state.request.tenant, 0) < cap:
                return state
            insort(self.parked.setdefault(state.request.tenant, []), self.order.pop(), key=_by_rank)

    def started(self, state: RequestState) -> None:
        """`head` (or a suspect) has been given memory; it is still to be popped."""
        if not state.admitted:
            state.admitted = True
            if self.order.follows_service:
                self.order.admit(state)
        self._count(state, -1)
        self.running_of[state.request.tenant] += 1

    def pop(self, state: RequestState) -> None:
        """Take out what has started."""
        if state.suspicion is None:
            self.order.pop()

    def stopped(self, state: RequestState, now_s: float) -> None:
        """A request that ran gives its tenant's slot back."""
        tenant = state.request.tenant
        self.running_of[tenant] -= 1
        if self.running_of[tenant] == 0:
            del self.running_of[tenant]
        self.unpark(tenant, now_s)

    def unpark(self, tenant: str, now_s: float) -> None:
        """One of the tenant's slots came free."""
        parked = self.parked.get(tenant)
        while parked:
            state = parked.pop(0)
            if state.status is RequestStatus.WAITING:
                self.order.restore(state, now_s)
                break
        if parked is not None and not parked:
            del self.parked[tenant]

    def unpark_all(self, now_s: float) -> None:
        """The cap has changed: `head` sets aside again what the new one keeps out."""
        for parked in self.parked.values():
            for state in reversed(parked):  # each goes before its peers
                if state.status is RequestStatus.WAITING:
                    self.order.restore(state, now_s)
        self.parked.clear()

    def finished(self, state: RequestState) -> None:
        """A request has reached its end (called for no abort)."""
        if self.order.follows_service:
            self.order.finish(state)

    # ---- another order ------------------------------------------------------------------

    def switch_order(self, order: Order, live: Iterable[RequestState], now_s: float) -> None:
        """Every request keeps what it has; only which comes next changes."""
        self.unpark_all(now_s)
        waiting = self.order.drain()
        self.order = order
        for state in live:
            order.adopt(state)
        for state in waiting:
            order.push(state, now_s)
