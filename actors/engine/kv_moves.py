"""Executes the core's `KVMove`s on every rank of every stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from actors.engine.config import EngineConfig
from actors.executor.stage_set import StageSet, StagesFailed
from actors.scheduling.core import Core
from actors.scheduling.events import (
    ClearTier,
    Event,
    Fetch,
    KVMove,
    Moved,
    ResetPrefixCache,
    SaveNow,
    TierHolds,
)
from actors.scheduling.state import RequestState, RequestStatus
from actors.transport.background_tasks import BackgroundTasks
from actors.transport.running_time import running_timeout

_CLEAR_S = 600.0  # to delete files: many, and nobody waits for their room


class KVMoves:
    """Every move is answered, or the stages are reported lost. Runs on the event loop."""

    def __init__(
        self,
        stages: StageSet,
        tasks: BackgroundTasks,
        config: EngineConfig,
        handle: Callable[[Event], None],
        lost: Callable[[str, bool], None],
        core: Core | None = None,
    ) -> None:
        """lost: called with why, and whether a move hung (True) or failed."""
        self._stages = stages
        self._tasks = tasks
        self._deadline_s = config.step_deadline_s  # in addition to a fetch's own limit
        self._handle = handle
        self._lost = lost
        self._core = core
        self._tier = None if core is None else core.tier
        self.waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []  # see `_until`
        self._era = 0  # counts builds of the stages; answers of earlier ones are dropped
        self._turn = asyncio.Lock()  # of this era: whose move the ranks carry out

    def start(self) -> None:
        """Report the initial content of the stores to the core, if there are any."""
        if self._stages.tier:
            self._handle(TierHolds(self._stages.tier))

    def begin(self, move: KVMove) -> None:
        self._tasks.start(self._carry_out(move, self._era, self._turn))

    def forget(self) -> None:
        """Drop all answers still to come, because the stages are lost or end."""
        self._era += 1
        self._turn = asyncio.Lock()
        for _, answer in self.waiting:  # what was not saved is computed again
            if not answer.done():
                answer.set_result(None)
        self.waiting = []

    async def saved(self, request_id: int | None = None) -> None:
        """Returns once the blocks completed so far are in the tier, or given up.

        With a request, which is about to move: waits until it completes one more block, or runs no
        longer, and then for its own blocks, which are saved before all others.
        """
        if self._tier is None or self._core is None:
            return
        queue = self._tier.queue
        if request_id is None:
            self._handle(SaveNow())
            num_queued = queue.num_queued
            await self._until(lambda: queue.num_settled >= num_queued)
            return
        await self._grown(request_id, _num_shared)
        state = self._core.live_requests.get(request_id)
        if state is None or (num_shared := _num_shared(state)) is None:
            return
        own = state.block_hashes(num_shared, self._core.config.block_size)
        last = tuple([digest for digest in own if queue.is_open(digest)])
        if last:
            self._handle(SaveNow(last))
        await self._until(lambda: not any(map(queue.is_open, last)))

    async def fetched(self, digests: Sequence[bytes]) -> int:
        """Returns once these, of which `FetchEarly` has told, are here, or given up. Returns how
        many are here, from the first."""
        tier = self._tier
        if tier is None:
            return 0
        await self._until(lambda: not any(map(tier.is_coming, reversed(digests))))
        return len(tier.block_manager.match(digests))

    async def reset(self) -> None:
        """Forget all cached KV; returns once the tier has deleted its own, or the stages are
        lost, of which the next do so."""
        self._handle(ResetPrefixCache())
        if (tier := self._tier) is not None:
            await self._until(lambda: not tier.contents.num_clears)

    async def next_token(self, request_id: int) -> None:
        """Returns right behind the request's next token, when a stream that moves loses least. At
        once if it does not run."""
        await self._grown(request_id, lambda state: state.num_tokens)

    async def _grown(self, request_id: int, size: Callable[[RequestState], int | None]) -> None:
        """Returns once `size` of the request has changed, or it runs no longer."""
        state = None if self._core is None else self._core.live_requests.get(request_id)
        if state is not None and (before := size(state)) is not None:
            running = RequestStatus.RUNNING
            await self._until(lambda: state.status is not running or size(state) != before)

    async def _until(self, holds: Callable[[], bool]) -> None:
        if not holds():
            answer = asyncio.get_running_loop().create_future()
            self.waiting.append((holds, answer))
            await answer

    def tell(self) -> None:
        """Answer those that need not wait longer; after events, if there are any."""
        for holds, answer in self.waiting:
            if not answer.done() and holds():
                answer.set_result(None)
        self.waiting = [(holds, answer) for holds, answer in self.waiting if not answer.done()]

    async def _carry_out(self, move: KVMove, era: int, turn: asyncio.Lock) -> None:
        """Moves stand one behind another in a thread of each rank, where each may use its own
        limit. A move's deadline therefore begins once those before it are answered."""
        limit_s = move.limit_s if isinstance(move, Fetch) else 0.0
        deadline_s = self._deadline_s + (_CLEAR_S if isinstance(move, ClearTier) else limit_s)
        failure = f"no answer to a move of KV within {deadline_s:.1f} s"
        answers, is_hung = None, False
        answering = asyncio.create_task(self._stages.move(move))
        try:
            async with turn, running_timeout(deadline_s):
                answers = await answering
        except TimeoutError:
            is_hung = True
        except StagesFailed as error:
            failure = str(error)
        if era != self._era:
            return
        if answers is None:
            self._lost(failure, is_hung)
        else:
            counts, changes = zip(*answers, strict=True)
            self._handle(Moved(move.move_id, min(counts), tuple(changes)))


def _num_shared(state: RequestState) -> int | None:
    """Blocks of a request that others find; None: they find none."""
    return state.num_committed_blocks if state.cacheable and not state.is_private else None
