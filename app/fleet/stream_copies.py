"""Copies of streams' KV to the engines that will continue them; the streams go on meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

from actors.fleet.moves import COPIED_WITHIN_S, COPIES_FOR_S, LAST_BLOCK_WITHIN_S
from app.engine_client.channel import QuestionFailed
from app.engine_client.client import EngineUnavailable
from app.fleet.connection import Connection, FleetRequest
from app.fleet.routing import FleetRouting

logger = logging.getLogger("legato.fleet")


class StreamCopies:
    """connections: to the engines that this front can reach. handed_over: streams that no engine
    computes while the KV of their prompt is saved. Both are maintained by the owner.

    start: runs a coroutine. move: called with a stream whose copy is done and the engine that it
    leaves for `receiver_id`. ended: called with an engine of which another may be copied now.
    """

    def __init__(
        self,
        routing: FleetRouting,
        connections: Mapping[str, Connection],
        handed_over: Mapping[int, FleetRequest],
        start: Callable[[Coroutine[None, None, None]], None],
        move: Callable[[FleetRequest, Connection], None],
        ended: Callable[[Connection], None],
    ) -> None:
        self._routing = routing
        self._connections = connections
        self._handed_over = handed_over
        self._start = start
        self._move = move
        self._ended = ended
        # By identity: streams that are copied, and those of them whose next engine begins no other
        # copy yet.
        self.open: dict[int, FleetRequest] = {}
        self._fetching: dict[int, FleetRequest] = {}

    def __contains__(self, fleet_request: FleetRequest) -> bool:
        return id(fleet_request) in self.open

    def begin_leaving(
        self, fleet_requests: list[FleetRequest], connection: Connection
    ) -> list[FleetRequest]:
        """Copy some streams of this draining engine; returns those that need not or cannot be."""
        snapshot, since_s, now_s = (
            connection.snapshot, connection.leaving_since_s, time.monotonic()
        )  # fmt: skip
        if snapshot is None or not snapshot.shares_kv or since_s is None:
            return fleet_requests
        if now_s - since_s > COPIES_FOR_S:
            return fleet_requests
        at_once = [r for r in fleet_requests if not r.has_tokens]
        begun = [r for r in fleet_requests if r.has_tokens]
        for fleet_request, engine_id in list(
            self._routing.copies(begun, self._busy(), self.expected(), now_s)
        ):
            if engine_id is None:
                at_once.append(fleet_request)
            else:
                self._begin(fleet_request, engine_id, connection, snapshot.block_size)
        return at_once

    def begin_relief(self, fleet_requests: Sequence[FleetRequest], connection: Connection) -> None:
        """Copy some streams of an engine that misses its objective, or move them where no KV is
        shared."""
        snapshot = connection.snapshot
        if snapshot is None:
            return
        num_going = sum(r.connection is connection for r in self.open.values())
        now_s = time.monotonic()
        for fleet_request, engine_id in list(
            self._routing.relieved(fleet_requests, self._busy(), self.expected(), now_s, num_going)
        ):
            if snapshot.shares_kv:
                self._begin(fleet_request, engine_id, connection, snapshot.block_size)
            else:
                fleet_request.receiver_id = engine_id
                self._move(fleet_request, connection)
                fleet_request.receiver_id = ""

    def kv_saved(
        self, fleet_request: FleetRequest, digests: Sequence[bytes], is_last: bool = False
    ) -> None:
        """The engine that will continue it fetches what of it is saved. is_last: before what it
        fetches of others, since the stream moves then."""
        there = self._connections.get(fleet_request.receiver_id)
        if there is None or not there.is_open:
            found = self._routing.receiver(fleet_request, self.expected(), time.monotonic())
            there = self._connections.get(found or "")
            if there is None:
                return
            fleet_request.receiver_id = there.engine_id
        there.fetch_early(digests, is_last)

    def expected(self) -> Iterator[FleetRequest]:
        """Streams that an engine expects because it fetches their KV early."""
        for connection in self._connections.values():
            yield from (r for r in connection.fleet_requests if r.receiver_id)
        yield from (r for r in self._handed_over.values() if r.receiver_id)

    def _busy(self) -> set[str]:
        return {r.receiver_id for r in self._fetching.values()}

    def _begin(
        self, fleet_request: FleetRequest, to: str, connection: Connection, block_size: int
    ) -> None:
        fleet_request.receiver_id = to
        for known in (self.open, self._fetching):
            known[id(fleet_request)] = fleet_request
        self._start(self._copy(fleet_request, connection, block_size))

    async def _copy(
        self, fleet_request: FleetRequest, connection: Connection, block_size: int
    ) -> None:
        """The engine that will continue it fetches its KV meanwhile, and last the block that it
        completes next; then it moves, and few tokens are left to be computed."""
        is_whole = False
        try:
            async with asyncio.timeout(COPIED_WITHIN_S):
                is_whole = await self._fetched(fleet_request, connection, block_size)
            del self._fetching[id(fleet_request)]
            self._ended(connection)  # another may have waited for this one
            async with asyncio.timeout(LAST_BLOCK_WITHIN_S):
                request_id = fleet_request.request.request_id
                await self._fetched(fleet_request, connection, block_size, request_id)
                await connection.ask("next_token", request_id)
        except (TimeoutError, EngineUnavailable, QuestionFailed) as error:
            logger.info("a copy from engine %s ends early: %r", connection.engine_id, error)
        except Exception:  # a fault of this front: the stream stays, or moves as it is
            logger.exception("a copy from engine %s failed", connection.engine_id)
        finally:
            self._fetching.pop(id(fleet_request), None)
            del self.open[id(fleet_request)]
        # From an engine that serves, a stream goes only for a better place.
        goes = is_whole or connection.was_leaving
        is_here = connection.computes(fleet_request)
        if goes and is_here and fleet_request.receiver_id in self._connections:
            self._move(fleet_request, connection)
        if connection.computes(fleet_request):
            fleet_request.receiver_id = ""  # the engine is gone, or cannot take it any longer
        self._ended(connection)

    async def _fetched(
        self, fleet_request: FleetRequest, connection: Connection, block_size: int, *to_come: int
    ) -> bool:
        """Its blocks are saved and fetched; returns whether they are there, but for one that was
        completed meanwhile. to_come: see the question `kv_saved`."""
        await connection.ask("kv_saved", *to_come)
        if fleet_request.receiver_id not in self._connections and not connection.was_leaving:
            raise EngineUnavailable("the engine that was to continue it is gone")
        if not connection.computes(fleet_request):  # it has ended meanwhile
            return False
        digests = self._routing.digests(fleet_request, block_size)
        self.kv_saved(fleet_request, digests, is_last=bool(to_come))
        there = self._connections.get(fleet_request.receiver_id)
        if there is None:
            raise EngineUnavailable("no engine can take it")
        return int(await there.ask("kv_fetched", digests)) >= len(digests) - 1
