"""A replica's link to its scheduler: the actor, and the socket between them.

The scheduler takes no actor calls while it serves (`actors.engine.scheduler` gives the reason), so
remote calls use the socket too (`channel`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import time
from contextlib import suppress
from typing import Any, Protocol

import ray

from actors.engine.config import EngineConfig
from actors.engine.peers import FrontAddress
from actors.engine.scheduler import SchedulerActor
from actors.executor.placement import (
    create_stages,
    current_group,
    kill_stages,
    scheduler_options,
)
from actors.stage.spec import StageInfo
from actors.transport.addresses import private_directory
from actors.transport.notices import notify
from actors.transport.pipeline import StageHandles
from actors.transport.running_time import RunningTime
from actors.transport.wire import FrameProtocol, listen
from app.engine_client.channel import ChannelOwner, QuestionFailed, SchedulerChannel
from app.engine_client.client import EngineUnavailable
from app.engine_client.standby import Standby
from app.engine_client.streams import OpenRequests

logger = logging.getLogger("legato.engine")

_LEAVE_WITHIN_S = 10.0
_LEAVING_PERIOD_S = 0.2
_UNFINISHED = ("num_waiting", "num_decoding", "num_prefilling", "num_finishing")  # of a status
_MAX_STARTS = 3
_LOOK_EVERY_S = 1.0
_SILENT_S = 45.0  # a scheduler touches its replica's socket once it runs; this is for its start


@functools.cache
def _remote(actor_class: type) -> Any:
    """Once for all starts: Ray keeps each class that it is given for good, in every process."""
    return ray.remote(actor_class)


class EngineFailed(RuntimeError):
    """The engine could not be started; the message is the loader's."""


class Membership(Protocol):
    """An engine's entry for the fronts of its fleet; each new scheduler joins again. Its owner
    repeats the latest one from time to time."""

    def new_front_address(self) -> FrontAddress:
        """The address at which the next scheduler accepts fronts."""
        ...

    async def join(self, fronts: FrontAddress, tcp_address: str | None) -> None:
        """Publish to fronts that the engine accepts connections there."""
        ...

    async def part(self) -> None:
        """Remove the entry: the engine takes no new requests."""
        ...


class SchedulerLink(SchedulerChannel):
    """One scheduler, from start to end.

    fronts: where fronts connect; None outside a fleet. `tcp_address`: likewise, by TCP.
    """

    def __init__(
        self,
        config: EngineConfig,
        open_requests: OpenRequests,
        owner: ChannelOwner,
        standby: Standby,
        fronts: FrontAddress | None = None,
    ) -> None:
        super().__init__(open_requests, owner)
        self._config = config
        self._standby = standby
        self.fronts = fronts
        self.tcp_address: str | None = None
        self._actor: Any = None
        self._stages: StageHandles = []
        self._serving: asyncio.Task[None] | None = None  # done when the scheduler ends

    async def open(self) -> tuple[StageInfo, int]:
        """Start the actor, which loads the stages; returns a rank's report and the number of
        blocks.

        Raises EngineFailed naming the cause.
        """
        directory = private_directory()
        path = str(directory / "replica")
        connected: asyncio.Future[FrameProtocol] = asyncio.get_running_loop().create_future()

        def accept() -> FrameProtocol:
            protocol = FrameProtocol(self._received, self._lost)
            if not connected.done():
                connected.set_result(protocol)
            return protocol

        server, _ = await listen(path, accept)
        try:
            started = await self._start(path, connected)
            info, num_blocks, self.tcp_address = started
            self._socket = await connected
        finally:
            server.close()
            shutil.rmtree(directory, ignore_errors=True)
        self._serving = asyncio.create_task(self._serve())
        return info, num_blocks

    async def _start(
        self, path: str, connected: asyncio.Future[FrameProtocol]
    ) -> tuple[StageInfo, int, str | None]:
        """The result of `SchedulerActor.start`, with retries if the process dies."""
        group = current_group()
        options = scheduler_options(group)
        num_starts = 1
        while True:
            self._stages = await self._standby.take()
            if not self._stages:
                self._stages = create_stages(self._config, group)
                for ranks in self._stages:
                    for actor in ranks:  # they import torch while the scheduler starts
                        actor.warm_up.remote(with_grammars=False, when_idle=False)
            scheduler = _remote(SchedulerActor).options(**options)
            self._actor = scheduler.remote(self._config, self._stages)
            try:
                return await self._started(path)
            except ray.exceptions.RayTaskError as error:
                raise EngineFailed(str(error.cause)) from error
            except ray.exceptions.RayError as error:
                # One that had connected was complete: starting it again would not help.
                if connected.done() or num_starts == _MAX_STARTS:
                    raise EngineFailed(f"the scheduler died while starting: {error}") from error
            num_starts += 1
            self.tell(f"the scheduler died while starting: start {num_starts} of {_MAX_STARTS}")
            self.kill()

    async def _started(self, path: str) -> tuple[StageInfo, int, str | None]:
        """The result of `SchedulerActor.start`; kills a scheduler that is hung, which ends it."""
        os.utime(path)
        start = asyncio.ensure_future(self._actor.start.remote(path, self.fronts))
        silent = RunningTime()
        while not start.done():
            await asyncio.wait({start}, timeout=_LOOK_EVERY_S)
            if silent.since(os.stat(path).st_mtime, time.time(), _LOOK_EVERY_S) > _SILENT_S:
                logger.error("the scheduler does nothing while it starts: killing it")
                ray.kill(self._actor)
                os.utime(path)
        started: tuple[StageInfo, int, str | None] = start.result()
        return started

    def standby_taken(self, name: str) -> None:
        """The scheduler, having ended its stages, uses the standby, which ends with this link."""
        self._stages = self._standby.taken(name)

    async def _serve(self) -> None:
        with suppress(ray.exceptions.RayError):
            await self._actor.serve.remote()
        self._lost()  # without effect if the socket has closed before

    async def join(self, membership: Membership) -> None:
        """Let fronts find it. A failure costs nothing: the entry is repeated (`Membership`)."""
        if self.fronts is None:
            return
        try:
            await membership.join(self.fronts, self.tcp_address)
        except Exception:  # of Ray, while the GCS is away
            logger.exception("fronts cannot be told of the scheduler yet")

    async def check(self) -> None:
        """Kill a scheduler that is alive but does not answer; its loss starts a rebuild."""
        if not self.is_open:
            return  # the socket has closed, which started the rebuild
        try:
            await self.ask("stage_pids")
        except QuestionFailed as error:
            logger.error("heartbeat: %s", error)  # an error is an answer too
        except EngineUnavailable:
            if self.is_open:
                logger.error("scheduler does not answer: killing it")
                self.kill()

    async def leave(self) -> None:
        """Let it take no new requests; returns once all that it has accepted have ended."""
        with suppress(EngineUnavailable, QuestionFailed):  # lost: no request is left
            await self.ask("leave")
            while True:
                status = await self.ask("status")
                if not any(status[key] for key in _UNFINISHED):
                    break
                await asyncio.sleep(_LEAVING_PERIOD_S)

    async def close(self) -> None:
        """Let the scheduler end its stages, and end it."""
        socket, self._socket = self._socket, None
        if socket is not None and self._serving is not None:
            socket.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._serving, _LEAVE_WITHIN_S)
        self.kill()

    def tell(self, message: str) -> None:
        """A line of this engine for whoever runs the server."""
        notify(message, None if self.fronts is None else self.fronts.engine_id)

    def discard(self) -> None:
        """Kill it, for another one to take its place: it delivers nothing more, and its end is not
        reported, which would begin one more rebuild."""
        if (socket := self._socket) is not None:
            self._forget()
            socket.abort()
        self.kill()

    def kill(self) -> None:
        """End it at once, and the stages that were created with it."""
        if self._actor is not None:
            ray.kill(self._actor)
        kill_stages(self._stages)
        self._stages = []
