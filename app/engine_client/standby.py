"""Standby stages: processes that have imported everything, ready to load when stages are lost.

Starting Python and importing torch take most of a rebuild of a small model. A standby rank holds
no weights and no KV cache (200 MB a rank; `engine.standby`). It is made as soon as the engine is
ready, later when it is idle, and imports on idle cores only. The replica keeps it, so that it
outlives the scheduler: the scheduler is told its name and takes it for lost stages; a new scheduler
gets it as its first stages. On GPUs there is none: Ray gives a GPU to one process.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import ray

from actors.engine.config import EngineConfig
from actors.executor.placement import (
    create_stages,
    current_group,
    kill_stages,
    unused,
)
from actors.transport.notices import notify
from actors.transport.pipeline import StageHandles
from app.engine_client.channel import QuestionFailed
from app.engine_client.client import EngineUnavailable

_IDLE_FOR_S = 1.0
_AT_MOST_LATE_S = 30.0  # an engine that is never idle begins with it all the same
_TELL_AGAIN_S = 1.0
_LOST_AGAIN_S = 30.0  # from loss to loss at least: a machine without memory is left in peace
_BUSY = ("num_waiting", "num_decoding", "num_prefilling", "num_in_flight", "rebuilding")


class StandbyDied(Exception):
    """It is no longer there."""


class Standby:
    """One set of stage processes beside the running one. ask: a question to the scheduler."""

    def __init__(self, config: EngineConfig, ask: Callable[..., Awaitable[Any]]) -> None:
        self._config = config
        self._ask = ask
        self._actors: StageHandles = []
        self._name = ""
        self._is_ready = False
        self._gone = asyncio.Event()  # taken or given away
        self._keeper: asyncio.Task[None] | None = None

    def keep(self) -> None:
        """From now on replace a standby that is used up or lost, preferably in an idle engine."""
        if self._config.standby:
            self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        is_new = True  # no request has come yet: the best moment there is
        lost_again_s = time.monotonic()  # no next loss is answered before
        while True:
            try:
                if not is_new or await self._is_busy():
                    await self._idle()
                is_new = False
                await self._live()
            except Exception as error:  # of Ray, or without memory or files: tried again
                first, *_ = str(error).splitlines() or [""]  # Ray says much more of a death
                reason = f"{type(error).__name__}: {first}"
                notify(f"standby stages lost ({reason}): replacing them, no request waits")
                kill_stages(self._release())
                await self._told(None)
                await asyncio.sleep(lost_again_s - time.monotonic())
                lost_again_s = time.monotonic() + _LOST_AGAIN_S

    async def _live(self) -> None:
        """One standby, from its creation until it is used. Raises an error if it dies."""
        self._gone.clear()
        self._name = f"legato-standby-{uuid.uuid4().hex}"
        self._actors = create_stages(self._config, current_group(), standby=self._name)
        flat = [actor for ranks in self._actors for actor in ranks]
        warm = [actor.warm_up.remote(self._config.grammars, when_idle=True) for actor in flat]
        results = await asyncio.gather(*warm, return_exceptions=True)
        if self._gone.is_set():
            return
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self._is_ready = True
        ends = [*[_death(actor) for actor in flat], self._tell(self._name), self._gone.wait()]
        tasks = [asyncio.ensure_future(end) for end in ends]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if not self._gone.is_set():
            raise StandbyDied("a process died")

    async def _tell(self, name: str) -> None:
        """Tell the scheduler until it knows; it may be being rebuilt. Returns once it is gone."""
        while True:
            if await self._told(name):
                await self._gone.wait()
                return
            await asyncio.sleep(_TELL_AGAIN_S)

    async def _told(self, name: str | None) -> bool:
        try:
            await self._ask("stand_by", name)
        except (EngineUnavailable, QuestionFailed):
            return False
        return True

    async def _idle(self) -> None:
        """Return once the engine has been idle for a moment: starting processes delays steps."""
        begin_s = since_s = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(_IDLE_FOR_S / 2)
            now_s = asyncio.get_running_loop().time()
            if await self._is_busy():
                since_s = now_s
            if now_s - since_s >= _IDLE_FOR_S or now_s - begin_s >= _AT_MOST_LATE_S:
                return

    async def _is_busy(self) -> bool:
        try:
            status = await self._ask("status")
        except (EngineUnavailable, QuestionFailed):
            return True
        return any(status[key] for key in _BUSY)

    async def take(self) -> StageHandles:
        """For a new scheduler: created and not loaded; empty if there is none that answers."""
        is_ready, actors = self._is_ready, self._release()
        if is_ready:
            return await unused(actors)
        kill_stages(actors)  # imports on idle cores only, which on a busy machine may take for ever
        return []

    def taken(self, name: str) -> StageHandles:
        """The scheduler uses the standby of this name, which is no longer this one's to end."""
        return self._release() if name == self._name else []

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        kill_stages(self._release())

    def _release(self) -> StageHandles:
        actors, self._actors, self._is_ready = self._actors, [], False
        self._gone.set()
        return actors


async def _death(actor: Any) -> bool:
    """Return when its process dies."""
    with suppress(ray.exceptions.RayError):
        await actor.watch.remote()
    return True
