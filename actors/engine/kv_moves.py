"""Executes the core's Save and Fetch on every rank of every stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actors.engine.config import EngineConfig
from actors.engine.recovery import BackgroundTasks
from actors.executor.stage_set import StageSet, StagesFailed
from actors.scheduling.core import Core
from actors.scheduling.early_fetch import EarlyFetches
from actors.scheduling.events import Event, Fetch, KVMove, Moved, TierHolds
from actors.scheduling.save_queue import SaveQueue

_Queue = SaveQueue | EarlyFetches


class KVMoves:
    """Every move is answered, or the stages are reported lost. Runs on the event loop."""

    def __init__(
        self,
        stages: StageSet,
        tasks: BackgroundTasks,
        config: EngineConfig,
        handle: Callable[[Event], None],
        lost: Callable[[str], None],
        core: Core | None = None,
    ) -> None:
        self._stages = stages
        self._tasks = tasks
        self._deadline_s = config.step_deadline_s  # in addition to a fetch's own limit
        self._handle = handle
        self._lost = lost
        self._tier = None if core is None else core.tier
        self.waiting: list[tuple[_Queue, int, asyncio.Future[None]]] = []  # see `_settled`
        self._era = 0  # counts builds of the stages; answers of earlier ones are dropped

    def start(self) -> None:
        """Report the initial content of the stores to the core, if there are any."""
        if self._stages.tier:
            self._handle(TierHolds(self._stages.tier))

    def begin(self, move: KVMove) -> None:
        self._tasks.start(self._carry_out(move, self._era))

    def forget(self) -> None:
        """Drop all answers still to come, because the stages are lost or end."""
        self._era += 1
        for _, _, answer in self.waiting:  # what was not saved is computed again
            if not answer.done():
                answer.set_result(None)
        self.waiting = []

    async def saved(self) -> None:
        """Returns once the blocks completed so far are in the tier, or given up."""
        if self._tier is not None:
            await self._settled(self._tier.queue)

    async def fetched(self) -> None:
        """Returns once the blocks told of so far (`FetchEarly`) are here, or given up."""
        if self._tier is not None:
            await self._settled(self._tier.early)

    async def _settled(self, queue: _Queue) -> None:
        if queue.num_settled < queue.num_queued:
            answer = asyncio.get_running_loop().create_future()
            self.waiting.append((queue, queue.num_queued, answer))
            await answer

    def tell(self) -> None:
        """Answer those that need not wait longer; after events, if there are any."""
        for queue, until, answer in self.waiting:
            if until <= queue.num_settled and not answer.done():
                answer.set_result(None)
        self.waiting = [entry for entry in self.waiting if not entry[2].done()]

    async def _carry_out(self, move: KVMove, era: int) -> None:
        limit_s = move.limit_s if isinstance(move, Fetch) else None
        deadline_s = self._deadline_s + (limit_s or 0.0)
        failure = f"no answer to a move of KV within {deadline_s:.1f} s"
        answers = None
        try:
            async with asyncio.timeout(deadline_s):
                answers = await self._stages.move(move.blocks, limit_s)
        except TimeoutError:
            pass
        except StagesFailed as error:
            failure = str(error)
        if era != self._era:
            return
        if answers is None:
            self._lost(failure)
        else:
            counts, changes = zip(*answers, strict=True)
            self._handle(Moved(move.move_id, min(counts), tuple(changes)))
