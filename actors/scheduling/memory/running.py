"""Who holds KV memory: starting, growing, preempting and releasing requests.

Everything about blocks happens here; policies see only whether it worked.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from operator import attrgetter

from actors.scheduling.memory.block_manager import BlockManager
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.interfaces import CostModel, StepView
from actors.scheduling.state import NEVER, Fate, RequestState, Status
from actors.scheduling.memory.swap import Swapper
from actors.scheduling.queue.waiting import WaitingRoom

_by_rank = attrgetter("rank")


class Residents(WaitingRoom):
    """Implements `EngineView`. Lists are kept sorted by rank, best first."""

    def __init__(self, config: SchedulerConfig, order: str, cost_model: CostModel | None) -> None:
        super().__init__(config, order)
        self.swap = Swapper(config, cost_model)
        self.decoding: list[RequestState] = []
        self.prefilling: list[RequestState] = []
        self.num_leaving = 0
        self.leaving_blocks = 0  # at most so many come free as steps in flight are answered
        self.claimant: RequestState | None = None  # lacks a block that others will give back
        self.num_in_flight = 0
        self.in_flight: Sequence[StepView] = ()  # the core's own queue of steps, for reading
        self.num_preemptions = 0

        self.blocks = BlockManager(config.num_blocks)

        # Changes that the next plan must tell the stages
        self.released: list[int] = []
        self.copies: list[tuple[int, int]] = []

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
            self.swap.move_in(state)
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
        self.count_waiting(state, -1)
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
        keep = state.fate is Fate.QUEUE and not state.discard and self.swap.pays(state)
        if keep:
            self.swap.move_out(state)
        self.blocks.free(state.blocks)
        state.blocks, state.capacity = [], 0
        state.discard = False
        if state.fate is Fate.END:
            self.forget(state)
            return
        if not keep:
            state.planned = 0
        state.status = Status.WAITING
        self.count_waiting(state, 1)
        if state.fate is Fate.QUEUE:
            self.order.restore(state, self.now_s)
        else:
            self.isolated.append(state)

    def forget(self, state: RequestState) -> None:
        """The request is over and holds nothing on the device."""
        state.status = Status.ENDED
        del self.states[state.request_id]
        self.swap.drop(state)
        for heir in self.groups.ended(state):
            self.order.push(heir, self.now_s)

    def drop_waiting(self, state: RequestState) -> None:
        """A WAITING request is over."""
        self.count_waiting(state, -1)
        if state in self.isolated:
            self.isolated.remove(state)
        self.forget(state)
        self.unpark(state.request.tenant)  # it may have held the place of one set aside

    def lose_device(self) -> None:
        """The stages are new: memory is empty and nothing needs to be told to them.

        Only after every request has left.
        """
        self.blocks.reset()
        self.swap.host.reset()
        self.swap.clear()
        self.released, self.copies = [], []

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
