"""The engine client of a front: implements `EngineClient` over many engines.

A front keeps the request, the seed and every delivered token of its streams. So when an engine
dies, rebuilds its stages or leaves, its streams continue on other engines from their delivered
tokens. `actors.fleet` decides where streams start and move, from engines' snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from actors.fleet.fleet import Fleet
from actors.fleet.routers import Router
from actors.fleet.snapshot import EngineSnapshot, EngineState, PrefixUpdate
from actors.scheduling.events import Refuse
from actors.scheduling.interfaces import Quote, QuoteRequest
from actors.scheduling.request import Objective
from app.engine_client.client import (
    EngineClient,
    EngineUnavailable,
    GenerationRequest,
    ModelCard,
    TokenChunk,
    TokenSink,
)
from app.engine_client.iteration_feed import IterationFeed
from app.engine_client.streams import Stream
from app.fleet.connection import Connection, FleetRequest, fleet_requests_of
from app.fleet.finder import Finder
from app.fleet.live_changes import LiveChanges, reset_prefix_caches
from app.fleet.overview import StreamMoves, overview
from app.fleet.routing import FleetRouting
from app.fleet.stream_placement import RETRY_AFTER_S, StreamPlacement

logger = logging.getLogger("legato.fleet")

_SILENT_AFTER_S = 5.0  # an idle engine publishes once a second
_WATCH_PERIOD_S = 0.5
_ACQUAINTED_WITHIN_S = 10.0  # after a front's start
_ASLEEP = "no engine is running: a request starts one"


class FleetClient(EngineClient):
    """Implements `EngineClient`; everything runs on the front's event loop.

    start_within_s: longest wait of a new request for an engine. resume_within_s: likewise of a
    stream that lost its engine. sleeps: without requests there may be no engine. rebalance:
    requests and streams also leave engines that serve. adapters: by slot, as in
    `EngineSnapshot.adapters`; `FleetAdapters` changes them. order: with which engines start.
    """

    def __init__(
        self,
        finder: Finder,
        name: str,
        model_path: str,
        router: Router,
        *,
        start_within_s: float = 20.0,
        resume_within_s: float = 120.0,
        allow_inexact: bool = False,
        sleeps: bool = False,
        rebalance: bool = True,
        request_deadline_s: float = 3600.0,
        adapters: Mapping[int, str] = MappingProxyType({}),
        order: str = "auto",
    ) -> None:
        self._finder = finder
        self.name = name
        self._model_path = model_path
        self._sleeps = sleeps
        self._deadline_s = request_deadline_s
        self._fleet = Fleet()
        self._routing = FleetRouting(self._fleet, router, allow_inexact)
        self.adapters = dict(adapters)
        self._connections: dict[str, Connection] = {}
        self._placement = StreamPlacement(
            self._fleet, self._routing, self._connections,
            start_within_s=start_within_s, resume_within_s=resume_within_s, rebalance=rebalance,
        )  # fmt: skip
        self._of: dict[str, list[FleetRequest]] = {}  # request id -> its continuations
        self._card: ModelCard | None = None
        self._created_s = int(time.time())
        self._changes = LiveChanges(order)
        self._tasks: list[asyncio.Task[None]] = []
        self._snapshot_came = asyncio.Event()  # of an engine not connected before
        self.objective = Objective()
        self.iterations = IterationFeed()

    # ---- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Look for engines; returns once those that can be reached have published a snapshot. A
        front that answered earlier would refuse requests that they accept. While more engines serve
        another model than this one, clients are left to their fronts. The search continues."""
        self._finder.start(self)
        work = [self._watch(), self._report()] if self._sleeps else [self._watch()]
        self._tasks = [asyncio.create_task(each) for each in work]
        with suppress(TimeoutError):
            async with asyncio.timeout(_ACQUAINTED_WITHIN_S):
                await self._finder.refreshed()
                while any(c.snapshot is None for c in self.connections):
                    self._snapshot_came.clear()
                    await self._snapshot_came.wait()
        await self._finder.outnumbered(lambda: self._num_accepting)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._changes.close()
        self._placement.close()
        await self._finder.close()
        for connection in self._connections.values():
            connection.close()

    async def _watch(self) -> None:
        """Check what no message announces: silent engines, and waits that exceed their limit."""
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            try:
                now_s = time.monotonic()
                for connection in self.connections:
                    if connection.silent_s(now_s, _WATCH_PERIOD_S) > _SILENT_AFTER_S:
                        logger.error("engine %s is silent, treated as dead", connection.engine_id)
                        connection.cut()
                self._placement.place_waiting()
                self._placement.end_waits(now_s)
            except Exception:  # an error of one stream must not end the watch
                logger.exception("watching the fleet")

    async def _report(self) -> None:
        """Say how many requests wait for an engine to start; the cluster's store may not answer."""
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            try:
                # Without any engine yet, a front lacks the model's limits: it counts as one.
                waiting = max(self._placement.num_unplaced, int(self._card is None))
                await self._finder.report_waiting(waiting)
            except Exception as error:  # of the store: it is told again
                logger.warning("reporting requests that wait: %s: %s", type(error).__name__, error)

    # ---- EngineClient ------------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            missing = f"no engine of {self.name} has joined yet"
            raise EngineUnavailable(missing, retry_after_s=RETRY_AFTER_S)
        return self._card

    def is_ready(self) -> bool:
        return self._is_asleep or self._num_accepting > 0

    @property
    def _num_accepting(self) -> int:
        return sum(e.snapshot.accepts for e in self._fleet.engines.values())

    @property
    def _is_asleep(self) -> bool:
        """No engine takes requests, any there are end, and a request starts one."""
        states = [one.state for one in self.snapshots]
        is_asleep = all(state is EngineState.DRAINING for state in states)
        return self._sleeps and self._card is not None and is_asleep

    @property
    def failure(self) -> str | None:
        """Always: a front survives its engines."""
        return None

    @property
    def num_blocks(self) -> int:
        """KV blocks of one engine: all are configured alike."""
        return next((c.welcome.num_blocks for c in self._connections.values() if c.welcome), 0)

    @property
    def snapshots(self) -> list[EngineSnapshot]:
        """Snapshots of the engines that have published one."""
        return [engine.snapshot for engine in self._fleet.engines.values()]

    @property
    def moves(self) -> StreamMoves:
        """What became of streams whose engine died or left."""
        return self._placement.moves

    @property
    def num_engines(self) -> int:
        return len(self._fleet.engines)

    @property
    def num_open(self) -> int:
        return self._placement.num_open

    async def generate(
        self, request: GenerationRequest, sink: TokenSink | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        stream = Stream(sink)
        now_s = time.monotonic()
        fleet_requests = fleet_requests_of(request, stream, now_s, self.adapters)
        stream.num_open = request.n
        limit_s = self._deadline_s
        deadline = asyncio.get_running_loop().call_later(limit_s, stream.fail_late, limit_s)
        self._of[request.request_id] = fleet_requests
        try:
            self._placement.begin(fleet_requests)
            while stream.num_open > 0:
                for chunk in await stream.get():
                    yield chunk
        finally:
            deadline.cancel()
            self._of.pop(request.request_id, None)
            self._placement.abandon(fleet_requests)

    def finish_early(self, request_id: str, index: int) -> None:
        for fleet_request in self._of.get(request_id, ())[index : index + 1]:
            num_before = self.num_open
            self._placement.abandon([fleet_request])
            if self.num_open < num_before:
                fleet_request.stream.leave()

    async def status(self) -> Mapping[str, Any]:
        connections = self.connections
        if not connections:
            why = _ASLEEP if self._is_asleep else "there is no engine"
            raise EngineUnavailable(why, retry_after_s=RETRY_AFTER_S)
        asked = [connection.ask("status") for connection in connections]
        found = await asyncio.gather(*asked, return_exceptions=True)
        answers = {
            connection: answer
            for connection, answer in zip(connections, found, strict=True)
            if isinstance(answer, dict)
        }
        if not answers:
            raise EngineUnavailable("no engine answers", retry_after_s=RETRY_AFTER_S)
        return {**overview(answers, self.moves), "max_model_len": self.card.max_model_len}

    async def quote(self, asked: QuoteRequest) -> Quote:
        now_s = time.monotonic()
        best = self._routing.best(asked, now_s)
        connection = None if best is None else self._connections.get(best)
        if connection is None and self._is_asleep:
            return Quote(None, message=_ASLEEP)  # waiting for a yes would not wake it
        if connection is None:
            raise EngineUnavailable("no engine can serve now", retry_after_s=RETRY_AFTER_S)
        return await connection.quote(asked, now_s + connection.offset_s)

    async def reconfigure(self, changes: Mapping[str, Any]) -> None:
        await self._changes.make(changes, lambda: self.connections)

    async def reset_prefix_cache(self) -> None:
        await reset_prefix_caches(lambda: self.connections)

    def subscribe_iterations(self) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        return self.iterations.subscribe()

    @property
    def connections(self) -> list[Connection]:
        """Those that are open."""
        return [c for c in self._connections.values() if c.is_open]

    # ---- from the finder and the connections -----------------------------------------------------

    def is_connected(self, engine_id: str) -> bool:
        return engine_id in self._connections

    def joined(self, connection: Connection) -> None:
        """An engine has accepted this front; routers see it from its first snapshot on."""
        if not connection.is_open:
            return  # it has died since: nothing more would be heard of it
        self._connections[connection.engine_id] = connection
        self._changes.catch_up(connection)

    def published(self, connection: Connection, snapshot: EngineSnapshot) -> None:
        welcome = connection.welcome
        if welcome is None or not connection.is_open:
            return
        self.objective = Objective(snapshot.tbt_s, snapshot.ttft_s)
        self._fleet.published(snapshot)
        self._card = ModelCard(
            name=self.name,
            path=self._model_path,
            max_model_len=self._fleet.longest,
            vocab_size=welcome.vocab_size,
            eos_token_ids=welcome.eos_token_ids,
            created_s=self._created_s,
        )
        self._connections[connection.engine_id] = connection
        self._snapshot_came.set()
        self._placement.published(connection, snapshot)

    def prefixes_updated(self, update: PrefixUpdate) -> None:
        self._fleet.update_prefixes(update)

    def iterated(self, connection: Connection, records: Sequence[Any]) -> None:
        # After the streams that were just resumed, so that their tokens are sent first.
        shifted, engine_id = connection.shifted(records), connection.engine_id
        asyncio.get_running_loop().call_soon(self.iterations.publish, shifted, engine_id)

    def refused(self, connection: Connection, refusal: Refuse) -> None:
        self._placement.refused(connection, refusal)

    def lost(self, connection: Connection) -> None:
        """The engine has died, or is treated as dead."""
        self._connections.pop(connection.engine_id, None)
        self._fleet.lost(connection.engine_id)
        if self._card is not None and self._fleet.engines:  # the last one's stays known
            self._card = replace(self._card, max_model_len=self._fleet.longest)
        self._placement.lost(connection)
        self._finder.lost(connection.engine_id)
