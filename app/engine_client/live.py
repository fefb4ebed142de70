"""The engine client of a replica: the scheduler actor behind `EngineClient`.

A scheduler that dies is replaced, and every open request replayed: prompt and delivered tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from actors.engine.config import EngineConfig
from actors.fleet.snapshot import EngineSnapshot
from actors.scheduling.config import ConfigError
from actors.scheduling.events import Refuse
from actors.scheduling.interfaces import Quote, QuoteRequest
from actors.scheduling.request import Objective
from actors.stage.spec import StageInfo
from actors.transport.messages import Readiness, StandbyTaken
from app.engine_client.channel import EngineMessage, QuestionFailed
from app.engine_client.client import (
    EngineUnavailable,
    GenerationRequest,
    ModelCard,
    RequestRefused,
    TokenChunk,
    TokenSink,
)
from app.engine_client.foreseen import ForeseenRefusals
from app.engine_client.iteration_feed import IterationFeed
from app.engine_client.link import EngineFailed, Membership, SchedulerLink
from app.engine_client.standby import Standby
from app.engine_client.streams import OpenRequests, Stream, core_requests

logger = logging.getLogger("legato.engine")

_HEARTBEAT_S = 5.0
_READY_WITHIN_S = 20.0  # longest wait for an engine that is being rebuilt
_NOT_REBUILT = "the scheduler could not be rebuilt"


class LiveEngine:
    """Implements `EngineClient` and `ChannelOwner`; everything runs on the replica's event loop.

    membership: None for an engine without a fleet, which serves only its own replica.
    """

    def __init__(
        self,
        config: EngineConfig,
        name: str,
        *,
        max_rebuilds: int = 3,
        membership: Membership | None = None,
    ) -> None:
        self._config = config
        self._membership = membership
        self._name = name
        self._max_rebuilds = max_rebuilds
        self._info: StageInfo | None = None
        self.objective = Objective()  # of requests without an objective
        self._num_blocks = 0
        self._created_s = int(time.time())
        self._next_id = itertools.count(1)
        self._open = OpenRequests()
        self._foreseen: ForeseenRefusals | None = None  # until there is a refusal
        self._standby = Standby(config, lambda *asked: self._link.ask(*asked))
        self._link = self._new_link()
        self._ids: dict[str, list[int]] = {}  # request id -> its continuations' ids
        self._ready = asyncio.Event()
        self._failure: str | None = None
        self._rebuilds, self._is_building = 0, False
        self._heartbeat: asyncio.Task[None] | None = None
        self._rebuilding: asyncio.Task[None] | None = None
        self.iterations = IterationFeed()
        self.snapshot: EngineSnapshot | None = None  # the latest, in a fleet

    # ---- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Build the scheduler and its stages; raises EngineFailed naming the cause."""
        await self._build()
        self._heartbeat = asyncio.create_task(self._beat())
        self._standby.keep()

    async def _build(self) -> None:
        self._is_building, link = True, self._link
        try:
            self._info, self._num_blocks = await link.open()
            if self._membership is not None:
                await link.join(self._membership)
        finally:
            self._is_building = False
        if not link.is_open:
            raise EngineFailed("the scheduler died once it had started")
        if again := [entry.replayed() for entry in self._open.values()]:
            link.submit(again)  # before `_ready`, which lets new requests in
        self._ready.set()
        await self._read_objective()

    async def _read_objective(self) -> None:
        """From the scheduler, which replaces an objective that cannot be reached."""
        with suppress(EngineUnavailable, QuestionFailed):  # lost: the rebuild asks again
            status = await self._link.ask("status")
            self.objective = Objective(status["tbt_s"], status["ttft_s"])
            self._config = self._config.with_objective(self.objective.tbt_s)

    async def close(self) -> None:
        for task in (self._heartbeat, self._rebuilding):
            if task is not None:
                task.cancel()
        self._standby.close()
        await self._link.close()

    async def leave(self) -> None:
        """Take no new requests from fronts; returns once all accepted requests have ended."""
        if self._membership is not None:
            await self._membership.part()
        await self._link.leave()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            await self._link.check()

    async def _rebuild(self) -> None:
        try:
            await self._replace_scheduler()
        except Exception:  # of any type: Serve replaces a replica that says it has failed
            logger.exception("the rebuild of the scheduler failed")
            self._give_up()

    def _give_up(self) -> None:
        self._failure = _NOT_REBUILT
        self._ready.set()  # wakes new requests that wait for it
        self._open.fail_all(EngineUnavailable(self._failure))

    async def _replace_scheduler(self) -> None:
        begin_s = time.monotonic()
        while True:
            self._ready.clear()
            self._link.discard()
            self._rebuilds += 1
            if self._rebuilds > self._max_rebuilds:
                self._link.tell(f"giving up: {_NOT_REBUILT}, requests failing: {self.num_open}")
                self._give_up()
                return
            self._link.tell(f"scheduler lost: rebuilding it, requests waiting: {self.num_open}")
            self._config = replace(self._config, is_rebuild=True)
            try:
                self._link = self._new_link()
                await self._build()
                break
            except Exception as error:  # a full disk, no sockets, no memory: it counts
                logger.error("rebuild failed: %s: %s", type(error).__name__, error)
        took = f"{time.monotonic() - begin_s:.1f} s"
        self._link.tell(f"scheduler rebuilt in {took}, requests going on: {self.num_open}")

    # ---- EngineClient ------------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        info = self._info
        if info is None:
            raise EngineUnavailable("the model is still loading")
        return ModelCard(
            name=self._name,
            path=self._config.stage.model_path,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            created_s=self._created_s,
        )

    def is_ready(self) -> bool:
        return self._ready.is_set() and self._failure is None

    async def _until_ready(self) -> None:
        """Wait for a rebuild to end; raises EngineUnavailable if it fails or takes too long."""
        if self._failure is None and not self._ready.is_set():
            try:
                async with asyncio.timeout(_READY_WITHIN_S):  # `wait_for` may lose a cancellation
                    await self._ready.wait()
            except TimeoutError:
                raise EngineUnavailable("the engine is being rebuilt", retry_after_s=5.0) from None
        if self._failure is not None:
            raise EngineUnavailable(self._failure, retry_after_s=10.0)

    @property
    def failure(self) -> str | None:
        """Why the engine is beyond repair, for the replica's health check."""
        return self._failure

    @property
    def num_blocks(self) -> int:
        """KV blocks of the running engine."""
        return self._num_blocks

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def generate(
        self, request: GenerationRequest, sink: TokenSink | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        await self._until_ready()
        stream = Stream(sink)
        ids = self._ids[request.request_id] = self._submit(request, stream)
        loop, limit_s = asyncio.get_running_loop(), self._config.request_deadline_s
        deadline = loop.call_later(limit_s, stream.fail_late, limit_s)
        try:
            while stream.num_open > 0:
                for chunk in await stream.get():
                    yield chunk
        finally:
            deadline.cancel()
            self._ids.pop(request.request_id, None)
            self._abandon(ids)

    def foreseen(self, request: GenerationRequest) -> RequestRefused | None:
        if self._foreseen is None:
            return None
        return self._foreseen.find(request, self.objective, time.monotonic())

    def finish_early(self, request_id: str, index: int) -> None:
        ids = self._ids.get(request_id)
        if ids is not None and (entry := self._open.get(ids[index])) is not None:
            self._abandon([ids[index]])
            entry.stream.leave()

    def _submit(self, request: GenerationRequest, stream: Stream) -> list[int]:
        requests = core_requests(request, self._next_id, time.monotonic())
        self._open.add(requests, stream)
        if self._foreseen and (turned_away := self._foreseen.pop_turned_away()):
            self._link.turned_away(turned_away)
        try:
            self._link.submit(requests)
        except (TypeError, ValueError, OverflowError) as error:  # it cannot be encoded
            for core_request in requests:
                del self._open[core_request.request_id]
            raise RequestRefused(f"a value cannot be sent to the engine: {error}") from error
        return [r.request_id for r in requests]

    def _abandon(self, ids: list[int]) -> None:
        if left := [i for i in ids if self._open.pop(i, None) is not None]:
            self._link.abort(left)

    async def status(self) -> Mapping[str, Any]:
        return dict(await self._link.ask("status"))

    async def quote(self, asked: QuoteRequest) -> Quote:
        return await self._link.quote(asked, time.monotonic())  # the scheduler has the same clock

    async def stage_pids(self) -> list[list[int]]:
        """Process ids of the stage ranks, [stage][rank]."""
        return [list(ranks) for ranks in await self._link.ask("stage_pids")]

    async def reset_prefix_cache(self) -> None:
        await self._until_ready()
        await self._link.reset_prefix_cache()

    async def reconfigure(self, changes: Mapping[str, Any]) -> None:
        if not self._link.is_open:
            await self._until_ready()
        await self._link.reconfigure(changes)
        try:
            self._config = self._config.with_changes(changes)  # for the next scheduler
        except ConfigError as error:  # fronts have changed what this one follows, past `_config`
            self._link.tell(f"changed settings hold until the scheduler is rebuilt: {error}")
        await self._read_objective()

    def subscribe_iterations(self) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        return self.iterations.subscribe()

    # ---- from the scheduler ----------------------------------------------------------------------

    def _new_link(self) -> SchedulerLink:
        fronts = None if self._membership is None else self._membership.new_front_address()
        return SchedulerLink(self._config, self._open, self, self._standby, fronts)

    def on_message(self, message: EngineMessage) -> None:
        if isinstance(message, EngineSnapshot):
            self.snapshot = message
        elif isinstance(message, StandbyTaken):
            self._link.standby_taken(message.name)
        elif isinstance(message, Readiness):
            if message.is_ready:
                self._ready.set()
            else:
                self._ready.clear()

    def on_records(self, records: Sequence[Any]) -> None:
        self._rebuilds = 0
        # After the streams that were just resumed, so that their tokens are sent first.
        asyncio.get_running_loop().call_soon(self.iterations.publish, records)

    def on_refusal(self, refusal: Refuse) -> None:
        if (entry := self._open.get(refusal.request_id)) is not None:
            self._foreseen = self._foreseen or ForeseenRefusals()
            self._foreseen.note(refusal, entry.request, self.objective, time.monotonic())
        error = RequestRefused(
            refusal.message, param=refusal.param, retry_after_s=refusal.retry_after_s
        )
        self._open.fail(refusal.request_id, error)

    def on_lost(self) -> None:
        self._ready.clear()
        self._open.engine_lost()
        if not self._is_building:  # else `_build` raises
            self._rebuilding = asyncio.create_task(self._rebuild())
