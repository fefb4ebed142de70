"""The second tier of the prefix cache: when KV moves between the device and the stages' stores.

Every rank stores blocks by the digest of their content, in host memory and on disk, and reports
them. A block can be fetched only if every rank stores it. Moves run concurrently with steps; no
step touches a move's device blocks until the move is answered. The cost model treats a step that
runs beside a move as a separate kind, so budgets account for the slowdown.

- **Save.** Completed blocks are copied to the stores, one move at a time; those that a stream lacks
  which is about to move elsewhere go first.
- **Fetch.** If the tier continues the cached prefix of the request at the head of the queue, and
  fetching is predicted to be faster than computing, the request is set aside and later requests
  proceed. Fetched blocks enter the prefix cache, and the request returns to the head of the queue.
  Blocks that could not be fetched are computed.
- **Streams that move.** Engines of a node may share a tier (`tier_shared`), of which no engine
  knows what the others save. A request that comes with output was begun elsewhere: a fetch of all
  its blocks is tried. What is told of it before it comes is fetched early (`early_fetch`), and if
  it comes meanwhile, the rest is fetched at once behind that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile

from actors.scheduling.early_fetch import EarlyFetches
from actors.scheduling.events import (
    ClearTier,
    Fetch,
    FetchEarly,
    Instruction,
    Moved,
    Save,
    SaveNow,
    TierEvent,
)
from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.plan import StepShape
from actors.scheduling.save_queue import SaveQueue
from actors.scheduling.state import InFlight, RequestState
from actors.scheduling.tier_contents import PendingMove, TierContents

_LEAST_SAVED = 16  # blocks of a save, while steps run
_MOST_SAVING = 64  # blocks of all saves under way
_MOST_EARLY = 2  # early fetches: one begins while another is answered
_MOVE_S = 0.005  # fixed cost of a fetch
_EARLY_PATIENCE = 4.0  # an early fetch may take so many times as long as computing: nobody waits
_LEAST_LIMIT_S, _MOST_LIMIT_S = 2.0, 10.0  # bounds of the limit, twice the time to compute
_FORGET = 0.95  # decay of a measured rate each time it rules out a fetch


class SecondTier:
    """Call `fetch_ahead` before each look at the queue; `pop_moves` returns the instructions."""

    def __init__(self, requests: LiveRequests) -> None:
        self.requests = requests
        self.block_manager = requests.running.block_manager
        self.block_manager.pop_completed()  # starts recording completed blocks
        self.moves: dict[int, PendingMove] = {}
        self.num_moves = 0
        self.num_saved_blocks = self.num_fetched_blocks = self.num_direct_blocks = 0
        self.contents = TierContents(requests.config.tier_ranks)
        self._coming: dict[bytes, PendingMove] = {}
        self.early = EarlyFetches()
        self._early: dict[int, PendingMove] = {}  # early fetches under way
        self.queue = SaveQueue()
        self._block_s: float | None = None  # time to fetch one block; None: not measured
        self._last_answer_s = self._early_answer_s = -math.inf
        self._out: list[Instruction] = []

    @property
    def is_moving(self) -> bool:
        """Whether a step planned now would run beside a move."""
        return bool(self.moves)

    def pinned(self) -> Iterator[int]:
        """Device blocks that moves hold, once per reference."""
        for move in self.moves.values():
            yield from move.held

    def is_coming(self, digest: bytes) -> bool:
        """Whether it is being fetched, or will be fetched early."""
        return digest in self._coming or self.early.wants(digest)

    def statistics(self) -> dict[str, float]:
        return {
            "num_moves": len(self.moves),
            "num_tier_blocks": self.contents.num_held,
            "num_saved_blocks": self.num_saved_blocks,
            "num_fetched_blocks": self.num_fetched_blocks,
            "num_direct_blocks": self.num_direct_blocks,
            "num_early_blocks": self.early.num_taken,
        }

    def shape_of(self, step: InFlight) -> StepShape:
        """Shape of a step that ends now; a move may have begun since the step was planned."""
        beside_move = bool(self.moves) or self._last_answer_s > step.planned_at_s
        return step.shape._replace(beside_move=beside_move)

    # ---- answers ------------------------------------------------------------------------------

    def handle(self, event: TierEvent) -> None:
        if isinstance(event, Moved):
            self._moved(event)
        elif isinstance(event, FetchEarly):
            if self.requests.config.tier_shared and not self.contents.num_clears:
                most = self.block_manager.num_blocks
                self.early.add(event.digests, self.requests.now_s, most, event.is_last)
        elif isinstance(event, SaveNow):
            self.queue.hurry(event.first)
        else:
            self.contents.replace(event.ranks)

    def _moved(self, event: Moved) -> None:
        """End a move. Raises ValueError if it is not in progress."""
        move = self.moves.pop(event.move_id, None)
        if move is None:
            raise ValueError(f"answer to move {event.move_id}, which is not under way")
        self._last_answer_s = self.requests.now_s
        for rank, change in enumerate(event.changes):
            self.contents.change(rank, change.added, change.removed)
        self.num_direct_blocks += min((c.num_direct for c in event.changes), default=0)
        if self.queue.saving.pop(event.move_id, None) is not None:
            self.num_saved_blocks += event.num_blocks
        elif not move.blocks:
            self.contents.num_clears -= 1
        elif not move.is_stale:
            self._fetched(move, event.num_blocks)
        was_early = self._early.pop(event.move_id, None) is not None
        if was_early:
            self._early_answer_s = self.requests.now_s
        self.block_manager.free(move.held)
        may_look = was_early or event.num_blocks == len(move.blocks)
        self.requests.put_back(move.waiting, may_look)

    def _fetched(self, move: PendingMove, num_blocks: int) -> None:
        begun_s = max(move.begun_s, self._early_answer_s)  # it may have waited for another
        took_s = self.requests.now_s - begun_s - _MOVE_S
        block_s, known_s = max(0.0, took_s) / (num_blocks or len(move.blocks)), self._block_s
        if num_blocks and known_s is None:
            self._block_s = block_s
        elif known_s is not None and (num_blocks or block_s > known_s):  # a quick miss says nothing
            self._block_s = 0.7 * known_s + 0.3 * block_s
        self.num_fetched_blocks += num_blocks
        for _, digest in move.blocks:
            del self._coming[digest]
        for block, digest in move.blocks[:num_blocks]:
            self.block_manager.commit(block, digest)
        self.early.claimed([digest for _, digest in move.blocks[num_blocks:]])

    def forget_cached(self) -> None:
        """As of `LiveRequests`. What is stored is deleted; from now on neither it counts nor what
        is being moved."""
        self.requests.forget_cached()
        self.block_manager.pop_completed()
        self.queue.forget()
        self.early.clear()
        self._early.clear()
        self._coming.clear()
        for move in self.moves.values():
            move.is_stale = True
        self._clear()

    def _clear(self) -> None:
        self.contents.num_clears += 1
        self._out.append(ClearTier(self._begin([], ())))

    def lost(self, ranks: Sequence[Sequence[bytes]]) -> None:
        """The stages were rebuilt and store these blocks; no pending move will be answered. Call it
        before the block manager resets the device's blocks."""
        moves, self.moves = list(self.moves.values()), {}
        self._coming.clear()
        self.early.clear()
        self._early.clear()
        self.queue.clear()
        self._out.clear()
        for move in moves:
            self.requests.put_back(move.waiting, may_look=False)
        self.contents.replace(ranks)
        if self.contents.num_clears:
            self.contents.num_clears = 0
            self._clear()

    # ---- device to store ----------------------------------------------------------------------

    def pop_moves(self) -> list[Instruction]:
        """Instructions for moves; call it after the event's steps are planned."""
        self._save()
        while self.early.is_wanted and len(self._early) < _MOST_EARLY and self._fetch_early():
            pass  # each takes or drops some
        out, self._out = self._out, []
        return out

    def _save(self) -> None:
        """Begin saves: in batches while steps run, of any size when the engine is idle or a peer
        waits for the blocks."""
        queue, config, manager = self.queue, self.requests.config, self.block_manager
        fresh = [d for d in manager.pop_completed() if not self.contents.holds(d)]
        queue.add(fresh, manager.num_blocks)  # of more, most have been evicted
        can_wait = self.requests.num_in_flight and not config.hands_over
        most_moves = max(1, _MOST_SAVING // config.most_saved)
        while queue.num_unsaved and len(queue.saving) < most_moves:
            if can_wait and not queue.is_awaited and queue.num_unsaved < _LEAST_SAVED:
                return
            room = max(1, min(_MOST_SAVING, manager.num_blocks // 8)) - queue.num_saving
            most = min(config.most_saved, room)
            blocks = tuple(queue.take(self.num_moves + 1, manager.match, most))
            if not blocks:
                return
            held = [block for block, _ in blocks]
            manager.share(held)
            self._out.append(Save(self._begin(held, blocks), blocks))

    # ---- store to device ----------------------------------------------------------------------

    def fetch_ahead(self) -> None:
        """Set aside requests at the head of the queue that should wait for a fetch."""
        requests, running = self.requests, self.requests.running
        while True:
            state = requests.waiting.head(requests.now_s)
            if state is None or state.tier_asked:
                return
            if self.contents.is_empty and not self._was_begun_elsewhere(state):
                return
            if running.num_slots_taken >= requests.config.max_requests or not running.spares_blocks:
                return
            if (move := self._fetch(state)) is None:
                return
            move.waiting.append(requests.waiting.set_aside(requests.now_s))

    def _fetch(self, state: RequestState) -> PendingMove | None:
        """Begin or join a move for it; None: it starts without a fetch, or waits for memory."""
        blocks, size = self.block_manager, self.requests.config.block_size
        has_donor = self.requests.waiting.donor(state) is not None
        num_full = (state.num_tokens - 1) // size  # the last known token is always computed
        if not state.cacheable or state.host_blocks or has_donor or not num_full:
            state.tier_asked = True
            return None
        digests = state.block_hashes(num_full, size)
        self.early.claimed(digests)
        here = blocks.match(digests)
        coming = self._coming_early(digests[len(here) :])
        here += [block for block, _ in coming]
        if len(here) < num_full and (behind := self._coming.get(digests[len(here)])) is not None:
            return behind
        end, was_elsewhere = len(here), self._was_begun_elsewhere(state)
        while end < num_full and digests[end] not in self._coming:
            if not was_elsewhere and not self.contents.holds(digests[end]):
                break
            end += 1
        count = end - len(here)
        early = coming[-1][1] if coming else None  # answered after those before it
        comes_later = end < num_full and digests[end] in self._coming
        if not count:
            state.tier_asked = early is None
            return early
        alone = self.requests.running.num_slots_taken == 0
        spare = 0 if alone else int(self.requests.config.watermark * blocks.num_blocks)
        need = -(-state.num_tokens // size) - len(here) + blocks.num_unreferenced(here)
        if need + spare > blocks.num_free:
            return None  # too little memory to start after the fetch
        state.tier_asked = early is None  # else it looks again for what of that does not come
        compute_s = self.requests.prefill_s(len(here) * size, count * size)
        if _MOVE_S + (self._block_s or 0.0) * count >= compute_s:
            if self._block_s is not None:
                self._block_s *= _FORGET
            return early
        state.tier_asked &= not comes_later  # by another move, which it joins after this one
        blocks.share(here)
        return self.moves[self._begin_fetch(here, digests[len(here) : end], compute_s)]

    def _begin_fetch(self, held: list[int], digests: Sequence[bytes], compute_s: float) -> int:
        """Fetch these into blocks of their own; the move holds those of `held` too."""
        fresh = self.block_manager.allocate(len(digests))
        fetched = tuple(zip(fresh, digests, strict=True))
        move_id = self._begin(held + fresh, fetched)
        self._coming.update((digest, self.moves[move_id]) for digest in digests)
        limit_s = min(max(_LEAST_LIMIT_S, 2 * compute_s), _MOST_LIMIT_S)
        self._out.append(Fetch(move_id, fetched, limit_s))
        return move_id

    def _coming_early(self, digests: Sequence[bytes]) -> list[tuple[int, PendingMove]]:
        """Blocks that early fetches fill, and which does, for as many of these as they have."""
        filled = {d: (block, move) for move in self._early.values() for block, d in move.blocks}
        return [filled[digest] for digest in takewhile(filled.__contains__, digests)]

    def _fetch_early(self) -> bool:
        """Begin the next early fetch, unless a request lacks the memory; or drop blocks that are
        computed sooner. Returns whether another may begin."""
        requests, blocks = self.requests, self.block_manager
        head = requests.waiting.head(requests.now_s)
        is_refused = head is not None and head.refused_version == blocks.version
        if is_refused or not requests.running.spares_blocks:
            return False
        spare = int(requests.config.watermark * blocks.num_blocks)
        digests = self.early.take(
            lambda digest: digest in self._coming or bool(blocks.match((digest,))),
            (blocks.num_free - spare) // 2, requests.now_s,
        )  # fmt: skip
        compute_s = self.requests.prefill_s(0, len(digests) * requests.config.block_size)
        if not digests or (self._block_s or 0.0) * len(digests) >= _EARLY_PATIENCE * compute_s:
            self.early.claimed(digests)
            return bool(digests)
        move_id = self._begin_fetch([], digests, compute_s)
        self._early[move_id] = self.moves[move_id]
        return True

    def _was_begun_elsewhere(self, state: RequestState) -> bool:
        is_shared = self.requests.config.tier_shared and not self.contents.num_clears
        return is_shared and bool(state.request.output)

    def _begin(self, held: list[int], blocks: tuple[tuple[int, bytes], ...]) -> int:
        self.num_moves += 1
        self.moves[self.num_moves] = PendingMove(held, blocks, self.requests.now_s)
        return self.num_moves
