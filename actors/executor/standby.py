"""Standby stages: processes that have imported everything, ready to load when stages are lost.

Starting Python and importing torch take most of a rebuild of a small model. A standby rank holds
no weights and no KV cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import ray

from actors.engine.config import EngineConfig
from actors.executor.placement import create_stages, current_group

logger = logging.getLogger("legato.stages")

_ANSWERS_WITHIN_S = 2.0
_IDLE_FOR_S = 1.0
_AT_MOST_LATE_S = 30.0  # an engine that is never idle gets its standby all the same
_LOST_AGAIN_S = 30.0  # wait after a loss, so that a machine without memory is left in peace


class StandbyDied(Exception):
    """It is no longer there."""


class Standby:
    """One set of stage processes beside the running one; `keep` makes it, `take` uses it up."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._actors: list[list[Any]] = []
        self._keeper: asyncio.Task[None] | None = None
        self._taken = asyncio.Event()
        self._is_ready = False

    @property
    def state(self) -> Literal["none", "starting", "ready"]:
        """none: and none will be."""
        if self._keeper is None:
            return "none"
        return "ready" if self._is_ready else "starting"

    def keep(self, is_idle: Callable[[], bool]) -> None:
        """From now on replace a standby that is used up or lost, preferably when `is_idle`."""
        self._keeper = asyncio.create_task(self._keep(is_idle))

    async def _keep(self, is_idle: Callable[[], bool]) -> None:
        while True:
            await _idle(is_idle)
            try:
                await self._live()
            except Exception as error:  # of Ray, or without memory or files: tried again
                logger.warning("standby stages: %s: %s", type(error).__name__, error)
                self._kill()
                await asyncio.sleep(_LOST_AGAIN_S)

    async def _live(self) -> None:
        """One standby, from its creation until it is taken. Raises an error if it dies."""
        self._taken.clear()
        actors = self._actors = create_stages(self._config, current_group(), is_standby=True)
        flat = [actor for ranks in actors for actor in ranks]
        await asyncio.gather(*[actor.warm_up.remote(self._config.grammars) for actor in flat])
        self._is_ready = self._actors is actors
        ends = [_death(actor) for actor in flat] + [self._taken.wait()]
        tasks = [asyncio.ensure_future(end) for end in ends]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if not self._taken.is_set():
            raise StandbyDied("a process died")

    async def take(self) -> list[list[Any]]:
        """The standby, now the caller's, created and not loaded; empty if there is none that
        answers.
        """
        actors, is_ready = self._actors, self._is_ready
        self._actors, self._is_ready = [], False
        self._taken.set()
        if not is_ready:  # its processes may only be starting
            return actors
        flat = [actor for ranks in actors for actor in ranks]
        try:
            pids = asyncio.gather(*[actor.pid.remote() for actor in flat])
            await asyncio.wait_for(pids, _ANSWERS_WITHIN_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.error("the standby stages are lost too: %s", type(error).__name__)
            _kill(flat)
            return []
        return actors

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        self._kill()

    def _kill(self) -> None:
        actors, self._actors, self._is_ready = self._actors, [], False
        _kill([actor for ranks in actors for actor in ranks])


async def _idle(is_idle: Callable[[], bool]) -> None:
    """Return once the engine has been idle for a moment, since starting processes delays steps."""
    begin_s = since_s = asyncio.get_running_loop().time()
    while True:
        await asyncio.sleep(_IDLE_FOR_S / 2)
        now_s = asyncio.get_running_loop().time()
        if not is_idle():
            since_s = now_s
        if now_s - since_s >= _IDLE_FOR_S or now_s - begin_s >= _AT_MOST_LATE_S:
            return


async def _death(actor: Any) -> bool:
    """Return when its process dies."""
    with suppress(ray.exceptions.RayError):
        await actor.watch.remote()
    return True


def _kill(actors: list[Any]) -> None:
    for actor in actors:
        with suppress(ray.exceptions.RayError):
            ray.kill(actor)
