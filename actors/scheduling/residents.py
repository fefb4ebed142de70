"""Who holds KV memory: starting, growing, preempting and releasing requests.

Everything about blocks happens here; policies see only whether it worked.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Sequence
from operator import attrgetter

from actors.scheduling.blocks import BlockManager, HostPool
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.groups import Groups
from actors.scheduling.interfaces import CostModel, StepShape, StepView
from actors.scheduling.orders import build_order
from actors.scheduling.state import NEVER, Fate, RequestState, Status

_by_rank = attrgetter("rank")


class Residents:
    """Implements `EngineView`. Lists are kept sorted by rank, best first."""

    def __init__(self, config: SchedulerConfig, order: str, cost_model: CostModel | None) -> None:
        self.config = config
        self.cost_model = cost_model
        self.order = build_order(order, config)
        self.now_s = 0.0
        self.states: dict[int, RequestState] = {}  # every request not ENDED
        self.decoding: list[RequestState] = []
        self.prefilling: list[RequestState] = []
        self.isolated: deque[RequestState] = deque()  # suspects, to be run alone
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self.num_leaving = 0
        self.leaving_blocks = 0  # at most so many come free as steps in flight are answered
        self.claimant: RequestState | None = None  # lacks a block that others will give back
        self.num_in_flight = 0
        self.in_flight: Sequence[StepView] = ()  # the core's own queue of steps, for reading
        self.num_preemptions = 0
        self.num_swaps = 0

        self.blocks = BlockManager(config.num_blocks)
        self.host = HostPool(config.num_host_blocks)
        self.groups = Groups()
        self.running_of: dict[str, int] = defaultdict(int)  # running requests of a tenant
        self.waiting_of: dict[str, int] = defaultdict(int)  # waiting requests of a tenant
        self.parked: dict[str, deque[RequestState]] = {}  # set aside: their tenant is at its cap

        # Changes that the next plan must tell the stages
        self.released: list[int] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swapped_out: list[RequestState] = []  # whose copies stand in swap_out
        self.swap_in: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.returned_host_blocks: list[int] = []  # free once the plan with swap_in is done

    # ---- EngineView -------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return self.blocks.num_free

    @property
    def num_blocks(self) -> int:
        return self.config.num_blocks

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def num_residents(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    # ---- waiting ----------------------------------------------------------------------

    def enter(self, state: RequestState) -> None:
        """A new request waits."""
        self.states[state.request_id] = state
        self._count_waiting(state, 1)
        if self.groups.join(state):
            self.order.push(state, self.now_s)

    def _count_waiting(self, state: RequestState, sign: int) -> None:
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

    # ---- starting ---------------------------------------------------------------------

    def start(self, state: RequestState, first_chunk: int, reserve: bool) -> bool:
        """Give a waiting request KV blocks and a place; False (and no change) if it must wait.

        reserve: blocks for its maximum length at once (request-level systems).
        """
        config, blocks, size = self.config, self.blocks, self.config.block_size
        if self.num_residents + self.num_leaving >= config.max_requests:
            return False
        claimant = self.claimant
        if claimant is not None and claimant.rank < state.rank:
            if claimant.status is Status.RUNNING:
                return False
            self.claimant = None
        alone = not (self.decoding or self.prefilling or self.num_leaving)
        if state.refused_version == blocks.version and not alone:
            return False
        shared, begin, source = self._reusable(state)
        tokens = state.length
        if reserve:
            tokens = max(tokens, state.end)
        elif config.allocation == "chunk":
            tokens = max(min(tokens, begin + first_chunk), len(state.host_blocks) * size)
        num_new = -(-tokens // size) - len(shared)
        need = num_new + blocks.num_unreferenced(shared)
        spare = 0 if alone else int(config.watermark * config.num_blocks)
        if need + spare > blocks.num_free:
            state.refused_version = blocks.version
            return False
        blocks.share(shared)
        state.blocks = shared + blocks.allocate(num_new)
        state.capacity = len(state.blocks) * size
        if source is not None:
            blocks.share((source,))  # until the copy is done
            self.copies.append((source, state.blocks[len(shared)]))
        if state.host_blocks:
            self.swap_in += zip(state.host_blocks, state.blocks, strict=False)
            self.returned_host_blocks += state.host_blocks
            state.host_blocks = []
        self._settle(state, begin)
        return True

    def _reusable(self, state: RequestState) -> tuple[list[int], int, int | None]:
        """KV that exists already: (blocks to share, tokens they spare, block to copy behind)."""
        if state.host_blocks:
            return [], state.planned, None
        size = self.config.block_size
        shared: list[int] = []
        if state.cacheable:
            # The last known token is always computed: its logits give the next one.
            shared = self.blocks.match(state.digests((state.length - 1) // size, size))
        donor = self.groups.donor(state)
        begin = len(shared) * size
        if donor is None or begin >= state.num_prompt_tokens - 1:
            return shared, begin, None
        state.prompt_logprobs = donor.prompt_logprobs
        begin = state.num_prompt_tokens - 1
        num_full, rest = divmod(begin, size)
        return donor.blocks[:num_full], begin, donor.blocks[num_full] if rest else None

    def _settle(self, state: RequestState, begin: int) -> None:
        if not state.admitted:
            state.admitted = True
            state.num_cached_tokens = min(begin, state.num_prompt_tokens)
            self.order.admit(state)
        self._count_waiting(state, -1)
        self.running_of[state.request.tenant] += 1
        state.status = Status.RUNNING
        state.planned = begin
        state.num_committed = 0
        state.attend_at = 0
        insort(self.prefilling, state, key=_by_rank)

    def to_decoding(self, state: RequestState) -> None:
        """Its known tokens are all planned."""
        self.prefilling.remove(state)
        insort(self.decoding, state, key=_by_rank)

    def resort(self) -> None:
        """Ranks have changed."""
        self.decoding.sort(key=_by_rank)
        self.prefilling.sort(key=_by_rank)

    # ---- growing ----------------------------------------------------------------------

    def grow(self, state: RequestState, num_tokens: int, step_id: int) -> list[int] | None:
        """Append blocks until `num_tokens` fit, preempting worse ranks; None if it must wait.

        Requests already in the step being planned are never preempted.
        """
        blocks, size = self.blocks, self.config.block_size
        need = -(-num_tokens // size) - len(state.blocks)
        while not blocks.can_allocate(need):
            enough_returns = blocks.num_free + self.leaving_blocks >= need
            victim = None if enough_returns else self._victim(state, step_id)
            if victim is None:
                self._claim(state)
                return None
            self.preempt(victim)
        if state is self.claimant:
            self.claimant = None
        fresh = blocks.allocate(need)
        state.blocks += fresh
        state.capacity = len(state.blocks) * size
        return fresh

    def _claim(self, state: RequestState) -> None:
        """Until the best-ranked who lacks a block has it, no worse rank may start.

        Otherwise a policy that prefers prompts would give the victim its memory back at once,
        and the two would take turns for ever.
        """
        claimant = self.claimant
        if claimant is None or claimant.status is not Status.RUNNING or state.rank < claimant.rank:
            self.claimant = state

    def _victim(self, state: RequestState, step_id: int) -> RequestState | None:
        """The worst-ranked request behind `state` that the step does not hold yet."""
        worst: RequestState | None = None
        for residents in (self.decoding, self.prefilling):
            for other in reversed(residents):
                if other.rank <= state.rank:
                    break
                if other.step_id != step_id:
                    if worst is None or other.rank > worst.rank:
                        worst = other
                    break
        return worst

    # ---- leaving ----------------------------------------------------------------------

    def preempt(self, state: RequestState) -> None:
        """Back to the queue; its tokens stay, its KV is recomputed or swapped."""
        state.num_preemptions += 1
        self.num_preemptions += 1
        self.leave(state, Fate.QUEUE)

    def leave(self, state: RequestState, fate: Fate) -> None:
        """A RUNNING request is planned no more; blocks go back when nothing in flight uses them."""
        if state in self.prefilling:
            self.prefilling.remove(state)
        else:
            self.decoding.remove(state)
        self.groups.vacated(state)
        tenant = state.request.tenant
        self.running_of[tenant] -= 1
        if self.running_of[tenant] == 0:
            del self.running_of[tenant]
        self.unpark(tenant)
        state.fate = fate
        state.status = Status.LEAVING
        state.attend_at = 0  # its results need a look
        self.num_leaving += 1
        self.leaving_blocks += len(state.blocks)
        if state.in_flight == 0:
            self.drained(state)

    def drained(self, state: RequestState) -> None:
        """Nothing in flight touches the LEAVING request: its fate is fulfilled."""
        self.num_leaving -= 1
        self.leaving_blocks -= len(state.blocks)
        if state.mirrored:
            self.released.append(state.request_id)
            state.mirrored = False
        keep = state.fate is Fate.QUEUE and not state.discard and self._swaps(state)
        if keep:
            self._copy_to_host(state)
        self.blocks.free(state.blocks)
        state.blocks, state.capacity = [], 0
        state.discard = False
        if state.fate is Fate.END:
            self.forget(state)
            return
        if not keep:
            state.planned = 0
        state.status = Status.WAITING
        self._count_waiting(state, 1)
        if state.fate is Fate.QUEUE:
            self.order.restore(state, self.now_s)
        else:
            self.isolated.append(state)

    def forget(self, state: RequestState) -> None:
        """The request is over and holds nothing on the device."""
        state.status = Status.ENDED
        del self.states[state.request_id]
        self.host.free(state.host_blocks)
        state.host_blocks = []
        for heir in self.groups.ended(state):
            self.order.push(heir, self.now_s)

    def drop_waiting(self, state: RequestState) -> None:
        """A WAITING request is over."""
        self._count_waiting(state, -1)
        if state in self.isolated:
            self.isolated.remove(state)
        self.forget(state)
        self.unpark(state.request.tenant)  # it may have held the place of one set aside

    # ---- swapping ---------------------------------------------------------------------

    def _swaps(self, state: RequestState) -> bool:
        """Whether moving the KV away and back beats computing it again."""
        choice, size = self.config.swap, self.config.block_size
        num_blocks = -(-state.planned // size)
        if choice == "never" or not 0 < num_blocks <= self.host.num_free:
            return False
        if choice == "always":
            return True
        if self.cost_model is None:
            return False
        recompute_s = self.cost_model.step_s(StepShape(prefills=((0, state.planned),)))
        return 2 * self.cost_model.swap_s(num_blocks) < recompute_s

    def _copy_to_host(self, state: RequestState) -> None:
        num_blocks = -(-state.planned // self.config.block_size)
        state.host_blocks = self.host.allocate(num_blocks)
        self.swap_out += zip(state.blocks, state.host_blocks, strict=False)
        self.swapped_out.append(state)
        self.num_swaps += 1

    def lose_host_copy(self, state: RequestState) -> None:
        """What was swapped out cannot be trusted: compute it again."""
        if state.host_blocks and state.status is Status.WAITING:
            self.host.free(state.host_blocks)
            state.host_blocks = []
            state.planned = 0

    def lose_device(self) -> None:
        """The stages are new: memory is empty and nothing needs to be told to them.

        Only after every request has left.
        """
        self.blocks.reset()
        self.host.reset()
        self.released, self.swapped_out, self.returned_host_blocks = [], [], []
        self.swap_out, self.swap_in, self.copies = [], [], []

    # ---- prefix cache -----------------------------------------------------------------

    def commit(self, state: RequestState, num_tokens: int) -> None:
        """The first `num_tokens` of a RUNNING request are computed: offer its full blocks."""
        size = self.config.block_size
        num_full = num_tokens // size
        if num_full > state.num_committed:
            digests = state.digests(num_full, size)
            for index in range(state.num_committed, num_full):
                self.blocks.commit(state.blocks[index], digests[index])
            state.num_committed = num_full

    def next_attention(self, state: RequestState) -> int:
        """The known length at which the next token completes a block or ends the request."""
        boundary = NEVER
        if self.config.prefix_cache:
            boundary = (state.num_committed + 1) * self.config.block_size
        return min(boundary, state.max_length - 1)

    # ---- switching --------------------------------------------------------------------

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
        self.resort()
