"""When the stages are built anew, and when the engine is given up."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, NoReturn

from actors.executor.stage_set import StageSet
from actors.scheduling.core import Core
from actors.scheduling.request import Grammar
from actors.transport.messages import Suspects

logger = logging.getLogger("legato.recovery")

# One request at fault fails fewer steps in a row: its suspects are halved, and one half succeeds.
_MAX_FAILED_STEPS = 4
# No request's fault: a process that can compute nothing any more, and one that lacks what every
# process needs (a grammar's first mask imports its compiler: without memory, an ImportError).
_BEYOND_REPAIR = (
    "CUDA error",
    "NCCL error",
    "ImportError:",
    "MemoryError:",
    "ModuleNotFoundError:",  # also what transformers makes of any failure to import
    "OSError:",
    "can't allocate memory",
    "can't start new thread",
)


def suspects_of(core: Core) -> Suspects:
    """What the replica keeps for the next scheduler, should this one end."""
    suspects = [s for group in core.trials for s in group if s.suspicion is not None]
    in_flight = {part.request_id for step in core.in_flight for part in step.plan.slices}
    return Suspects(
        tuple([(s.request_id, s.suspicion.num_losses) for s in suspects if s.suspicion]),
        tuple([s.request_id for s in suspects if s.request_id in in_flight]),
    )


def grammars_of(core: Core) -> set[Grammar]:
    """Of the requests that go on once the stages are built anew."""
    found = (state.request.sampling.grammar for state in core.live_requests.values())
    return {grammar for grammar in found if grammar is not None}


class BackgroundTasks:
    """Tasks that are not awaited: kept alive, and what they raise is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task failed", exc_info=error)


class Recovery:
    """Rebuilds the stages when they are lost or fail every step; bounded, whatever is raised.

    on_lost is called as a rebuild begins, on_rebuilt once the stages answer again and have what the
    requests need that go on then: `grammars`.
    """

    def __init__(
        self,
        stages: StageSet,
        max_rebuilds: int,
        tasks: BackgroundTasks,
        on_lost: Callable[[], None],
        grammars: Callable[[], Collection[Grammar]],
        on_rebuilt: Callable[[], None],
    ) -> None:
        self._stages = stages
        self._max_rebuilds = max_rebuilds
        self._tasks = tasks
        self._on_lost = on_lost
        self._grammars = grammars
        self._on_rebuilt = on_rebuilt
        self.num_rebuilds_in_a_row = 0  # to be set to 0 where a step succeeds
        self.is_rebuilding = False
        self.num_recoveries = 0

    def step_failed(self, message: str, num_in_a_row: int) -> None:
        """Steps that fail whatever they hold are the stages' fault, not that of a request."""
        if any(words in message for words in _BEYOND_REPAIR):
            self.lose(message)
        elif num_in_a_row >= _MAX_FAILED_STEPS:
            self.lose(f"{num_in_a_row} steps failed in a row: {message}")

    def lose(self, reason: str) -> None:
        """The stages are of no use any more."""
        if not self.is_rebuilding:
            self.is_rebuilding = True
            self._tasks.start(self._rebuild(reason))

    async def _rebuild(self, reason: str) -> None:
        """Kill what is left of the stages, build them anew, replay what was running."""
        begin_s = time.monotonic()
        try:
            self._on_lost()
            while True:
                self.num_rebuilds_in_a_row += 1
                logger.error("pipeline lost (%s): rebuild %d", reason, self.num_rebuilds_in_a_row)
                if self.num_rebuilds_in_a_row > self._max_rebuilds:
                    self._give_up(f"{self._max_rebuilds} rebuilds did not help")
                try:
                    await self._stages.rebuild()
                    await self._stages.prepare(self._grammars())
                    break
                except Exception as failure:  # a full disk, no sockets, no memory: it counts
                    reason = f"{type(failure).__name__}: {failure}"
            self.is_rebuilding = False
            self.num_recoveries += 1
            logger.warning("pipeline rebuilt in %.1f s", time.monotonic() - begin_s)
            self._on_rebuilt()
        except Exception:  # whatever it is, an engine that stays half rebuilt serves nothing
            logger.exception("recovery failed")
            self._give_up("recovery itself failed")

    def _give_up(self, reason: str) -> NoReturn:
        """The replica notices, builds a new scheduler, and is replaced if that does not help."""
        logger.critical("giving up: %s", reason)
        os._exit(1)
