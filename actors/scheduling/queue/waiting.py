"""Who waits: the order, what is set aside, and how much of it there is."""

from __future__ import annotations

from collections import defaultdict, deque

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.queue.groups import Groups
from actors.scheduling.queue import build_order
from actors.scheduling.state import RequestState, Status


class WaitingRoom:
    """WAITING requests are in the order, parked, held by their group, or isolated."""

    def __init__(self, config: SchedulerConfig, order: str) -> None:
        self.config = config
        self.order = build_order(order, config)
        self.now_s = 0.0
        self.states: dict[int, RequestState] = {}  # every request not ENDED
        self.isolated: deque[RequestState] = deque()  # suspects, to be run alone
        self.groups = Groups()
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self.waiting_of: dict[str, int] = defaultdict(int)  # waiting requests of a tenant
        self.running_of: dict[str, int] = defaultdict(int)  # running requests of a tenant
        self.parked: dict[str, deque[RequestState]] = {}  # set aside: their tenant is at its cap

    def enter(self, state: RequestState) -> None:
        """A new request waits."""
        self.states[state.request_id] = state
        self.count_waiting(state, 1)
        if self.groups.join(state):
            self.order.push(state, self.now_s)

    def count_waiting(self, state: RequestState, sign: int) -> None:
        """The request begins (1) or ceases (-1) to wait."""
        tenant = state.request.tenant
        self.num_waiting += sign
        self.num_waiting_tokens += sign * state.length
        self.waiting_of[tenant] += sign
        if self.waiting_of[tenant] == 0:
            del self.waiting_of[tenant]

    def head(self) -> RequestState | None:
        """The next to start, those of tenants at their cap set aside."""
        cap = self.config.max_running_per_tenant
        while True:
            state = self.order.peek(self.now_s)
            if state is None or cap is None:
                return state
            if self.running_of.get(state.request.tenant, 0) < cap:
                return state
            self.parked.setdefault(state.request.tenant, deque()).append(self.order.pop())

    def unpark(self, tenant: str) -> None:
        """One of the tenant's slots came free (or its cap was lifted)."""
        parked = self.parked.get(tenant)
        while parked:
            state = parked.popleft()
            if state.status is Status.WAITING:
                self.order.restore(state, self.now_s)
                break
        if parked is not None and not parked:
            del self.parked[tenant]

    def unpark_all(self) -> None:
        for tenant in list(self.parked):
            while tenant in self.parked:
                self.unpark(tenant)

    def switch_order(self, name: str, config: SchedulerConfig) -> None:
        """Everybody keeps what they have; only who comes next changes."""
        order = build_order(name, config)
        self.unpark_all()
        waiting = self.order.drain()
        self.order = order
        for state in self.states.values():
            order.adopt(state)
        for state in waiting:
            order.push(state, self.now_s)
