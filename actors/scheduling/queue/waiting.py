"""The waiting queue: its order, requests set aside, and counts; and the plain order, one heap.

In most orders a request's key is known on entry and never changes, so a heap suffices.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.queue.groups import Groups
from actors.scheduling.queue.order import Order
from actors.scheduling.state import RequestState, RequestStatus

FEW = 64


class WaitingQueue:
    """WAITING requests are in the order, parked, held by their group, or suspects to be tried."""

    def __init__(self, config: SchedulerConfig, order: Order) -> None:
        self.config = config
        self._use(order)
        self.groups = Groups()
        self.num_requests = 0
        self.num_tokens = 0  # known tokens: prompts, and outputs to be recomputed
        self.num_shared_tokens = 0  # of these, those that another of a group computes
        # See `Request.priority`
        self.num_background = self.num_background_tokens = self.num_background_shared = 0
        self.waiting_of: dict[str, int] = defaultdict(int)  # waiting requests of a tenant
        # The same by class (`RequestState.is_background`) and tenant: requests, and their tokens
        # but for shared ones
        self.waiting_by_class: dict[tuple[bool, str], tuple[int, int]] = {}
        self.running_of: dict[str, int] = defaultdict(int)  # running requests of a tenant
        # Set aside because their tenant is at its cap, best first
        self.parked: dict[str, list[RequestState]] = {}
        self._away: dict[str, set[RequestState]] = {}  # of a tenant: those that wait for a fetch
        self._sharing: set[RequestState] = set()  # whose prompt another of their group computes

    def add(self, state: RequestState, now_s: float) -> None:
        """Add a new request."""
        enters = state.request.group is None or self.groups.join(state)
        if not enters or self.donor(state) is not None:
            self._sharing.add(state)
        self._count(state, 1)
        if state.suspicion is not None:  # its trial starts it
            self.order.adopt(state)
        elif enters:
            self.order.push(state, now_s)

    def restore(self, state: RequestState, now_s: float) -> None:
        """Add a preempted request before its peers; a suspect waits for its trial instead."""
        self._count(state, 1)
        if state.suspicion is None:
            self.order.restore(state, now_s)

    def remove(self, state: RequestState) -> None:
        """Remove a waiting request that has ended."""
        self._count(state, -1)
        self._returned(state)
        self.order.remove(state)
        if state in (parked := self.parked.get(state.request.tenant, [])):
            parked.remove(state)  # an empty list goes with `unpark`

    def shared_tokens_of(self, state: RequestState) -> int:
        """All but the last one of a prompt that another computes."""
        num_prompt = min(state.num_tokens, state.num_prompt_tokens)
        return num_prompt - 1 if state in self._sharing else 0

    def _count(self, state: RequestState, sign: int) -> None:
        tenant, num_tokens = state.request.tenant, sign * state.num_tokens
        num_shared = sign * self.shared_tokens_of(state)
        if sign < 0:
            self._sharing.discard(state)
        self.num_requests += sign
        self.num_tokens += num_tokens
        self.num_shared_tokens += num_shared
        if state.is_background:
            self.num_background += sign
            self.num_background_tokens += num_tokens
            self.num_background_shared += num_shared
        self.waiting_of[tenant] += sign
        if self.waiting_of[tenant] == 0:
            del self.waiting_of[tenant]
        key = state.is_background, tenant
        num_requests, of_tenant = self.waiting_by_class.get(key, (0, 0))
        self.waiting_by_class[key] = num_requests + sign, of_tenant + num_tokens - num_shared
        if num_requests + sign == 0:
            del self.waiting_by_class[key]

    def num_of(self, tenant: str, is_background: bool | None) -> int:
        """Waiting requests of the tenant. is_background: of that class."""
        if is_background is None:
            return self.waiting_of.get(tenant, 0)
        return self.waiting_by_class.get((is_background, tenant), (0, 0))[0]

    def held_back(self, tenant: str, is_background: bool | None) -> tuple[int, int]:
        """Waiting requests, and their tokens but for shared ones, of other tenants that wait for
        others of these to end, as their tenant's cap does not let all of them run. is_background:
        of that class."""
        cap, num_held, num_tokens = self.config.max_running_per_tenant, 0, 0
        for (of_class, other), (num_waiting, tokens) in self.waiting_by_class.items():
            if cap is None or other == tenant or is_background not in (None, of_class):
                continue
            held = num_waiting - max(0, cap - self.running_of.get(other, 0))
            if held > 0:
                num_held += held
                num_tokens += tokens * held // num_waiting
        return num_held, num_tokens

    # ---- the next to start --------------------------------------------------------------

    def head(self, now_s: float) -> RequestState | None:
        """The next request to start; requests of tenants at their cap are set aside.

        The places of those that wait for a fetch are free meanwhile. But of those after them only
        one more comes: it may wait for a fetch, too, and fetches hold memory."""
        cap = self.config.max_running_per_tenant
        while True:
            state = self.order.peek(now_s)
            if state is None or cap is None:
                return state
            tenant = state.request.tenant
            num_running, away = self.running_of.get(tenant, 0), self._away.get(tenant, ())
            num_before = sum(self.order.goes_before(other, state) for other in away)
            if num_running < cap and num_running + num_before <= cap:
                return state
            parked = self.parked.setdefault(tenant, [])
            insort(parked, self.order.set_aside(), key=self.order.place)

    def started(self, state: RequestState) -> None:
        """Count the start of `head` (or of a suspect), to be followed by `pop`."""
        if not state.admitted:
            state.admitted = True
            if state.request.group is not None:
                self.groups.started(state.request.group)
            if self.follows_service:
                self.order.admit(state)
        self._count(state, -1)
        self.running_of[state.request.tenant] += 1

    def pop(self, state: RequestState) -> None:
        """Remove the started request from the order; a suspect is not in it."""
        if state.suspicion is None:
            self.order.pop()

    def stopped(self, state: RequestState, now_s: float) -> None:
        """Count a request that has stopped running; its blocks are no longer reliable."""
        if state.request.group is not None:
            self.groups.vacated(state)
        tenant = state.request.tenant
        self.running_of[tenant] -= 1
        if self.running_of[tenant] == 0:
            del self.running_of[tenant]
        self.unpark(tenant, now_s)

    def set_aside(self, now_s: float) -> RequestState:
        """Take the head, which waits for a fetch, out of the order, until it is put back."""
        state = self.order.set_aside()
        self._away.setdefault(state.request.tenant, set()).add(state)
        self.unpark(state.request.tenant, now_s)
        return state

    def put_back(self, state: RequestState, now_s: float) -> None:
        """Return a request that was set aside to the order, before its peers."""
        self._returned(state)
        self.order.restore(state, now_s)

    def _returned(self, state: RequestState) -> None:
        away = self._away.get(state.request.tenant)
        if away is not None:
            away.discard(state)
            if not away:
                del self._away[state.request.tenant]

    def unpark(self, tenant: str, now_s: float) -> None:
        """Return a request of the tenant that was set aside to the order."""
        parked = self.parked.get(tenant)
        while parked:
            state = parked.pop(0)
            if state.status is RequestStatus.WAITING:
                self.order.restore(state, now_s)
                break
        if parked is not None and not parked:
            del self.parked[tenant]

    def unpark_all(self, now_s: float) -> None:
        """The cap has changed: return all to the order; `head` applies the new cap."""
        for parked in self.parked.values():
            for state in reversed(parked):  # each goes before its peers
                if state.status is RequestStatus.WAITING:
                    self.order.restore(state, now_s)
        self.parked.clear()

    def served(self, states: Iterable[RequestState]) -> None:
        """Each of these, once per token, has got a token; only if `follows_service`."""
        self.order.serve([s for s in states if s.status is RequestStatus.RUNNING])

    def served_more(self, state: RequestState, num_drafts: int) -> None:
        """It has got so many tokens beyond the one that was planned."""
        if self.follows_service:
            self.served([state] * num_drafts)
        if self.order.preempts:
            self.order.charge({state: num_drafts})

    def finished(self, state: RequestState) -> None:
        """A request has finished (not called for aborts)."""
        if self.follows_service:
            self.order.finish(state)

    # ---- groups: continuations of one prompt ----------------------------------------------

    def donor(self, state: RequestState) -> RequestState | None:
        """A running request of its group whose computed prompt is the same, if KV continues it."""
        shares = state.request.group is not None and self.config.num_saved_states is None
        return self.groups.donor(state) if shares else None

    def prompt_done(self, state: RequestState, now_s: float) -> None:
        """The request's prompt is computed: members of its group that were held back may start."""
        if state.request.group is not None:
            for member in self.groups.prompt_done(state):
                self.order.push(member, now_s)

    def ended(self, state: RequestState, now_s: float) -> None:
        """The request has left; another member of its group may have to compute the prompt."""
        if state.request.group is not None:
            for leader in self.groups.ended(state):
                self._count(leader, -1)  # it shares no longer
                self._count(leader, 1)
                self.order.push(leader, now_s)

    # ---- another order ------------------------------------------------------------------

    def _use(self, order: Order) -> None:
        self.order = order
        self.follows_service = order.follows_service

    def switch_order(self, order: Order, live: Iterable[RequestState], now_s: float) -> None:
        """Switch the order; requests keep their state."""
        self.unpark_all(now_s)
        waiting = self.order.drain()
        self._use(order)
        for state in live:
            order.adopt(state)
        for state in waiting:
            order.push(state, now_s)


class HeapOrder(Order):
    """By a `value` known on entry; ties are ordered by submission."""

    def __init__(self, config: SchedulerConfig) -> None:
        # (key on entry, entry number, request)
        self._heap: list[tuple[tuple[float, int], int, RequestState]] = []
        self._num_entries = 0
        self._entry_of: dict[RequestState, int] = {}  # its entry that counts, while it is WAITING

    def value(self, state: RequestState) -> float:
        """Smaller is served earlier: by arrival, unless a subclass knows better."""
        return state.request.counts_from_s

    def push(self, state: RequestState, now_s: float) -> None:
        self.adopt(state)
        self._enter(state)

    def adopt(self, state: RequestState) -> None:
        state.order_key = (self.value(state), state.sequence_number)

    def restore(self, state: RequestState, now_s: float) -> None:
        self._enter(state)

    def _enter(self, state: RequestState) -> None:
        """Any earlier entry of it counts no longer."""
        self._num_entries += 1
        self._entry_of[state] = self._num_entries
        heapq.heappush(self._heap, (state.order_key, self._num_entries, state))
        self._drop()

    def remove(self, state: RequestState) -> None:
        self._entry_of.pop(state, None)
        self._drop()

    def _drop(self) -> None:
        """Entries that count no longer may never come to the top, to be skipped."""
        if len(self._heap) > 2 * len(self._entry_of) + FEW:
            self._heap = [one for one in self._heap if self._counts(*one)]
            heapq.heapify(self._heap)

    def _counts(self, key: tuple[float, int], number: int, state: RequestState) -> bool:
        return state.status is RequestStatus.WAITING and self._entry_of.get(state) == number

    def peek(self, now_s: float) -> RequestState | None:
        heap = self._heap
        while heap:
            _, number, state = heap[0]
            if self._counts(*heap[0]):
                return state
            heapq.heappop(heap)
            if self._entry_of.get(state) == number:
                del self._entry_of[state]
        return None

    def pop(self) -> RequestState:
        state = heapq.heappop(self._heap)[2]
        del self._entry_of[state]
        return state

    def drain(self) -> list[RequestState]:
        waiting = [one[2] for one in sorted(self._heap) if self._counts(*one)]
        self._heap.clear()
        self._entry_of.clear()
        return waiting
