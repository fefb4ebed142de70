"""The running requests and the KV blocks they hold: allocation, growth, release, prefix cache.

It is independent of the queue: `lifecycle` moves requests between the two.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from functools import partial
from operator import attrgetter

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.interfaces import StepTimePredictor
from actors.scheduling.memory.block_manager import BlockManager
from actors.scheduling.memory.swap import Swapper
from actors.scheduling.state import RequestState, RequestStatus

_by_order_key = attrgetter("order_key")


def _rank(state: RequestState) -> tuple[bool, tuple[float, int]]:
    """By it, requests get memory: in order, but background requests after all live ones."""
    return state.is_background, state.order_key


class RunningRequests:
    """Lists are kept sorted by `order_key`, first in order first."""

    def __init__(self, config: SchedulerConfig, cost_model: StepTimePredictor | None) -> None:
        self.config = config
        self.block_manager = BlockManager(config.num_blocks, config.num_saved_states)
        self.swap = Swapper(config, cost_model)
        self.decoding: list[RequestState] = []  # their prompt is planned to its end
        self.prefilling: list[RequestState] = []  # with prompt (or recomputation) left
        self.finishing: list[RequestState] = []
        self.num_finishing_blocks = 0  # at most these are freed by answers in flight
        self.claimant: RequestState | None = None  # waits for a block that others will free

        # Changes that the next plan must carry to the stages
        self.released: list[int] = []
        self.copies: list[tuple[int, int]] = []

    @property
    def num_requests(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def num_slots_taken(self) -> int:
        """Sequence slots in use: a FINISHING request keeps its own until it is drained."""
        return len(self.decoding) + len(self.prefilling) + len(self.finishing)

    # ---- starting ---------------------------------------------------------------------

    def start(
        self, state: RequestState, first_chunk: int, reserve: bool, donor: RequestState | None
    ) -> bool:
        """Give a waiting request KV blocks and a slot; False, which changes no memory, if it waits.

        reserve: blocks for its maximum length at once (request-level systems).
        donor: a running request whose computed prompt is the same.
        """
        blocks, size = self.block_manager, self.config.block_size
        num_slots_taken, claimant = self.num_slots_taken, self.claimant
        if num_slots_taken >= self.config.max_requests:
            return False
        if claimant is not None and _rank(claimant) < _rank(state):
            if claimant.status is RequestStatus.RUNNING:
                return False
            self.claimant = None
        alone = num_slots_taken == 0
        if state.refused_version == blocks.version and not (alone or self._is_cached_now(state)):
            return False
        shared, begin, source = self._reusable(state, donor)
        num_tokens = self._num_tokens_at_start(state, begin + first_chunk, reserve)
        num_new = -(-num_tokens // size) - len(shared)
        need = num_new + blocks.num_unreferenced(shared)
        spare = 0 if alone else int(self.config.watermark * self.config.num_blocks)
        if need + spare > blocks.num_free:
            state.refused_version = blocks.version
            state.awaited_digest = self._missing_digest(state, len(shared))
            return False
        blocks.share(shared)
        state.use_blocks(shared + blocks.allocate(num_new), size)
        if source is not None:
            blocks.share((source,))  # until the copy is done
            self.copies.append((source, state.block_table[len(shared)]))
        state.is_private &= bool(state.host_blocks)
        if state.host_blocks:
            self.swap.move_in(state)
        if not state.admitted:
            state.num_cached_tokens = min(begin, state.num_prompt_tokens)
        if donor is not None:
            state.prompt_logprobs = list(donor.prompt_logprobs)
            state.is_private |= donor.is_private
        state.status = RequestStatus.RUNNING
        state.num_computed_tokens = begin
        state.num_committed_blocks = 0
        state.slow_path_at = 0
        state.was_trimmed = False
        insort(self.prefilling, state, key=_by_order_key)
        return True

    def could_start(
        self, state: RequestState, first_chunk: int, reserve: bool,
        without: Sequence[RequestState], donor: RequestState | None = None,
    ) -> bool:  # fmt: skip
        """Whether memory would suffice with these preempted: not where moves of KV hold the rest.
        Arguments otherwise as of `start`, which would then not wait."""
        blocks, size = self.block_manager, self.config.block_size
        shared, begin, _ = self._reusable(state, donor)
        num_tokens = self._num_tokens_at_start(state, begin + first_chunk, reserve)
        need = -(-num_tokens // size) - len(shared) + blocks.num_unreferenced(shared)
        if len(without) < self.num_slots_taken:
            need += int(self.config.watermark * self.config.num_blocks)
        freed = blocks.num_freed_by([other.block_table for other in without], keep=shared)
        return need <= blocks.num_free + freed

    def _num_tokens_at_start(self, state: RequestState, end: int, reserve: bool) -> int:
        """Tokens to have blocks for at the start. end: of its first chunk."""
        if reserve:
            return max(state.num_tokens, state.end)
        if self.config.allocation == "chunk":
            swapped = len(state.host_blocks) * self.config.block_size
            return max(min(state.num_tokens, end), swapped)
        return state.num_tokens

    def _reusable(
        self, state: RequestState, donor: RequestState | None
    ) -> tuple[list[int], int, int | None]:
        """KV that exists already: (blocks to share, tokens they save, block to copy after them)."""
        if state.host_blocks:
            return [], state.num_computed_tokens, None
        size = self.config.block_size
        shared: list[int] = []
        if state.cacheable:
            # The last known token is always computed: its logits give the next one.
            num_blocks = (state.num_tokens - 1) // size
            shared = self.block_manager.match(state.block_hashes(num_blocks, size))
        begin = len(shared) * size
        if donor is None or begin >= state.num_prompt_tokens - 1:
            return shared, begin, None
        begin = state.num_prompt_tokens - 1
        num_full, rest = divmod(begin, size)
        table = donor.block_table
        return table[:num_full], begin, table[num_full] if rest else None

    def num_held_of(self, state: RequestState, donor: RequestState | None) -> int:
        """Tokens of a waiting request in blocks of running requests, which it would share."""
        size, num_tokens = self.config.block_size, state.num_tokens
        if state.host_blocks or not (state.cacheable or donor):
            return 0
        if donor is not None:
            return (state.num_prompt_tokens - 1) // size * size
        leaving = Counter([block for other in self.finishing for block in other.block_table])
        name, most = (state.request_id, num_tokens), (num_tokens - 1) // size
        digest_of = partial(state.block_hash, block_size=size)
        return size * self.block_manager.num_held(name, digest_of, most, leaving)

    def _is_cached_now(self, state: RequestState) -> bool:
        """Whether the block that was missing when the request was refused memory is cached."""
        digest = state.awaited_digest
        return digest is not None and bool(self.block_manager.match((digest,)))

    def _missing_digest(self, state: RequestState, num_shared: int) -> bytes | None:
        """Digest of the first block missing in the prefix cache, for a cacheable request."""
        num_full = (state.num_tokens - 1) // self.config.block_size
        if not state.cacheable or state.host_blocks or num_shared >= num_full:
            return None
        return state.block_hashes(num_shared + 1, self.config.block_size)[num_shared]

    def to_decoding(self, state: RequestState) -> None:
        """Move it to `decoding`: its known tokens are all planned."""
        self.prefilling.remove(state)
        insort(self.decoding, state, key=_by_order_key)

    def resort(self) -> None:
        """Sort again, because keys have changed."""
        self.decoding.sort(key=_by_order_key)
        self.prefilling.sort(key=_by_order_key)

    # ---- growing ----------------------------------------------------------------------

    def grow(self, state: RequestState, num_blocks: int) -> list[int]:
        """Append blocks to the table; requires `block_manager.can_allocate`."""
        if state is self.claimant:
            self.claimant = None
        fresh = self.block_manager.allocate(num_blocks)
        state.block_table += fresh
        state.use_blocks(state.block_table, self.config.block_size)
        return fresh

    def append_blocks(self, states: Sequence[RequestState]) -> list[int]:
        """Append one block to each table; returns the blocks."""
        fresh, size = self.block_manager.allocate(len(states)), self.config.block_size
        for state, block in zip(states, fresh, strict=True):
            state.block_table.append(block)
            state.capacity += size
            state.decode_limit = min(state.capacity, state.end)
        if self.claimant in states:
            self.claimant = None
        return fresh

    def free_tail(self, state: RequestState, num_blocks: int) -> None:
        """Free a table's blocks after its first `num_blocks`: the drafts in them were rejected.

        Only while no step in flight holds the request.
        """
        spare = state.block_table[num_blocks:]
        if not spare:
            return
        state.use_blocks(state.block_table[:num_blocks], self.config.block_size)
        state.was_trimmed = True
        if state.status is RequestStatus.FINISHING:
            self.num_finishing_blocks -= len(spare)
        self.block_manager.free(spare)

    def claim(self, state: RequestState) -> None:
        """While the first request that lacks a block waits for it, no later one may start.

        Otherwise a policy that prefers prompts would return the memory to the victim at once,
        and the two requests would preempt each other for ever.
        """
        claimant = self.claimant
        if (
            claimant is None
            or claimant.status is not RequestStatus.RUNNING
            or _rank(state) < _rank(claimant)
        ):
            self.claimant = state

    def victim(self, state: RequestState, step_id: int) -> RequestState | None:
        """The last request after `state` that is not yet in the step."""
        return max(self.victims(state, step_id), key=_rank, default=None)

    def victims(self, state: RequestState, step_id: int) -> list[RequestState]:
        """All that `victim` would return, one after another."""
        rank = _rank(state)
        return [
            other
            for running in (self.decoding, self.prefilling)
            for other in running
            if other.step_id != step_id and _rank(other) > rank
        ]

    @property
    def spares_blocks(self) -> bool:
        """Whether something that is done beside steps may fill free blocks. Not while a running
        request lacks memory, which gets them, nor while they hold what is yet to be copied to the
        host."""
        lacks = self.claimant is not None and self.claimant.status is RequestStatus.RUNNING
        return not lacks and not self.swap.is_leaving

    # ---- stopping ---------------------------------------------------------------------

    def stop(self, state: RequestState) -> None:
        """Stop planning a RUNNING request; steps in flight may still use its blocks."""
        (self.prefilling if state in self.prefilling else self.decoding).remove(state)
        if state is self.claimant:  # after a restart it may lack nothing
            self.claimant = None
        state.status = RequestStatus.FINISHING
        state.slow_path_at = 0  # its results take the slow path
        self.finishing.append(state)
        self.block_manager.num_let_go += 1
        self.num_finishing_blocks += len(state.block_table)

    def release(self, state: RequestState, keep_kv: bool) -> bool:
        """Free the blocks of a FINISHING request that no step in flight uses.

        keep_kv: move its KV to the host if that pays; returns whether it was.
        """
        self.finishing.remove(state)
        self.num_finishing_blocks -= len(state.block_table)
        if state.on_stages:
            self.released.append(state.request_id)
            state.on_stages = False
        kept = keep_kv and self.swap.pays(state)
        if kept:
            self.swap.move_out(state)
        self.block_manager.free(state.block_table)
        state.use_blocks([], 0)
        return kept

    def lose_device(self) -> None:
        """Reset for new stages: memory is empty and no change is pending.

        Requires that every request has stopped.
        """
        self.block_manager.reset()
        self.swap.lose_device()
        self.released, self.copies = [], []

    # ---- prefix cache -----------------------------------------------------------------

    def commit(self, state: RequestState, num_tokens: int) -> None:
        """Add the full blocks of a RUNNING request's first `num_tokens` to the prefix cache."""
        size, num_known = self.config.block_size, state.num_committed_blocks
        num_full = 0 if state.is_private else num_tokens // size
        for index in range(num_known, num_full):
            self.block_manager.commit(state.block_table[index], state.block_hash(index, size))
        state.num_committed_blocks = max(num_full, num_known)

    def complete_block(self, state: RequestState) -> None:
        """Like `commit`, for a decode whose known tokens have just filled one more block."""
        index, size = state.num_committed_blocks, self.config.block_size
        self.block_manager.commit(state.block_table[index], state.block_hash(index, size))
        state.num_committed_blocks = index + 1
        state.slow_path_at = min((index + 2) * size, state.end)

    def next_slow_path(self, state: RequestState) -> int:
        """The known length at which the next token completes a block or ends the request."""
        if state.is_private or not self.config.prefix_cache:
            return state.end
        return min((state.num_committed_blocks + 1) * self.config.block_size, state.end)
