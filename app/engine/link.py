"""The replica's end of its scheduler: the actor, and the socket between them.

The scheduler takes no actor calls while it serves (`actors.scheduler` says why), so questions go
the way of submissions, and answers come between the outputs. Messages are packed and read here;
rows of outputs are read where they are delivered (`streams`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray

from actors.engine_config import EngineConfig
from actors.placement import current_group, scheduler_options
from actors.scheduler import SchedulerActor
from actors.scheduling.events import Refuse
from actors.scheduling.request import Request
from actors.stage.spec import StageInfo
from actors.transport.messages import (
    AbortRequests,
    Answer,
    Ask,
    IterationOutputs,
    Question,
    Readiness,
    RefuseRequests,
    RequestsStarted,
    SubmitRequests,
    Suspects,
    pack_kind,
    unpack_kind,
)
from actors.transport.wire import FrameProtocol, listen, private_directory
from app.engine.client import EngineUnavailable

logger = logging.getLogger("legato.engine")

_ANSWER_WITHIN_S = 10.0
_LEAVE_WITHIN_S = 10.0


class EngineFailed(RuntimeError):
    """The engine could not be started; the message carries the loader's own words."""


class QuestionFailed(RuntimeError):
    """The scheduler raised instead of answering; the message says what."""


class SchedulerLink:
    """One life of a scheduler. `on_lost` is called once if it ends before `close`.

    on_rows, on_records: rows of outputs and of iterations, as `IterationOutputs` holds them.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_rows: Callable[[Sequence[Any]], None],
        on_records: Callable[[Sequence[Any]], None],
        on_refused: Callable[[Refuse], None],
        on_news: Callable[[Readiness | RequestsStarted | Suspects], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._config = config
        self._on_rows = on_rows
        self._on_records = on_records
        self._on_refused = on_refused
        self._on_news = on_news
        self._on_lost = on_lost
        self._actor: Any = None
        self._serving: asyncio.Task[None] | None = None  # as long as the scheduler does
        self._socket: FrameProtocol | None = None
        self._tickets = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}

    async def open(self) -> tuple[StageInfo, int]:
        """Start the actor, which loads the stages; what a rank reports, and the number of blocks.

        Raises EngineFailed naming the cause."""
        directory = private_directory()
        path = str(directory / "replica")
        connected: asyncio.Future[FrameProtocol] = asyncio.get_running_loop().create_future()

        def accept() -> FrameProtocol:
            protocol = FrameProtocol(self._received, self._lost)
            if not connected.done():
                connected.set_result(protocol)
            return protocol

        server, _ = await listen(path, accept)
        environment = {"RAY_CGRAPH_buffer_size_bytes": str(self._config.channel_bytes)}
        actor_class = ray.remote(SchedulerActor)
        self._actor = actor_class.options(
            **scheduler_options(current_group()), runtime_env={"env_vars": environment}
        ).remote(self._config)
        try:
            info, num_blocks = await self._actor.start.remote(path)
            self._socket = await connected
        except ray.exceptions.RayTaskError as error:
            raise EngineFailed(str(error.cause)) from error
        except ray.exceptions.RayError as error:
            raise EngineFailed(f"the scheduler died while starting: {error}") from error
        finally:
            server.close()
            shutil.rmtree(directory, ignore_errors=True)
        self._serving = asyncio.create_task(self._serve())
        return info, num_blocks

    async def _serve(self) -> None:
        with suppress(ray.exceptions.RayError):
            await self._actor.serve.remote()
        self._lost()

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def submit(self, requests: Sequence[Request]) -> None:
        self._send(SubmitRequests(tuple(requests)))

    def abort(self, request_ids: Sequence[int]) -> None:
        self._send(AbortRequests(tuple(request_ids)))

    def _send(self, message: SubmitRequests | AbortRequests | Ask) -> None:
        """Dropped when the scheduler is gone: `on_lost` tells of that."""
        if self._socket is not None:
            self._socket.send(pack_kind(message))

    def _received(self, frame: bytes) -> None:
        message = unpack_kind(frame)
        if isinstance(message, IterationOutputs):
            self._on_rows(message.rows)
            if message.records:
                self._on_records(message.records)
        elif isinstance(message, RefuseRequests):
            for refusal in message.refusals:
                self._on_refused(refusal)
        elif isinstance(message, Answer):
            self._answered(message)
        else:
            self._on_news(message)

    async def ask(self, question: Question, *arguments: Any) -> Any:
        """The scheduler's answer; raises EngineUnavailable when none comes and QuestionFailed
        when answering raised."""
        ticket = next(self._tickets)
        answer = self._asked[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(ticket, question, arguments))
            if self._socket is None:
                raise TimeoutError
            return await asyncio.wait_for(answer, _ANSWER_WITHIN_S)
        except TimeoutError as error:
            raise EngineUnavailable("the scheduler does not answer") from error
        finally:
            del self._asked[ticket]

    def _answered(self, message: Answer) -> None:
        answer = self._asked.get(message.ticket)
        if answer is None or answer.done():
            return
        if message.failure is None:
            answer.set_result(message.value)
        else:
            answer.set_exception(QuestionFailed(message.failure))

    def _lost(self) -> None:
        if self._socket is None:
            return  # known already, or not yet open: then `open` fails or `_serve` ends at once
        self._socket = None
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("the scheduler has ended"))
        self._on_lost()

    async def close(self) -> None:
        """Let the scheduler end its stages, and end it."""
        socket, self._socket = self._socket, None
        if socket is not None and self._serving is not None:
            socket.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._serving, _LEAVE_WITHIN_S)
        self.kill()

    def kill(self) -> None:
        """End it without asking."""
        if self._actor is not None:
            ray.kill(self._actor)
