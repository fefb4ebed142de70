"""The engine of every stream of a front: sending, refusals, moves, waits, failures."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from actors.fleet.balance import LOOKS_EVERY_S
from actors.fleet.fleet import Fleet
from actors.fleet.snapshot import EngineSnapshot, EngineState
from actors.scheduling.events import Refuse
from actors.transport.background_tasks import BackgroundTasks
from app.engine_client.channel import QuestionFailed
from app.engine_client.client import EngineUnavailable, RequestRefused
from app.fleet.connection import Connection, FleetRequest
from app.fleet.overview import StreamMoves
from app.fleet.routing import FleetRouting, refusal_of, told
from app.fleet.stream_copies import StreamCopies

logger = logging.getLogger("legato.fleet")

RETRY_AFTER_S = 5.0  # while no engine can serve
_SAVED_WITHIN_S = 2.0  # at least; see `StreamPlacement._hand_over`


class StreamPlacement:
    """connections: to the engines that this front can reach, maintained by `app.fleet.client`.

    start_within_s, resume_within_s: longest wait of a request for its first engine, and of a stream
    that has lost its engine. rebalance: requests and streams also leave engines that serve.
    """

    def __init__(
        self,
        fleet: Fleet,
        routing: FleetRouting,
        connections: dict[str, Connection],
        *,
        start_within_s: float,
        resume_within_s: float,
        rebalance: bool,
    ) -> None:
        self._fleet = fleet
        self._routing = routing
        self._connections = connections
        self._start_within_s = start_within_s
        self._resume_within_s = resume_within_s
        self._rebalances = rebalance
        self._unplaced: dict[int, FleetRequest] = {}  # by identity
        self._handed_over: dict[int, FleetRequest] = {}  # whose KV is still being saved
        self._tasks = BackgroundTasks()
        self._copies = StreamCopies(
            routing, connections, self._handed_over,
            self._tasks.start, self._copied, self._copy_ended,
        )  # fmt: skip
        self.moves = StreamMoves()

    @property
    def num_open(self) -> int:
        num_placed = sum(len(c.open_requests) for c in self._connections.values())
        return num_placed + len(self._unplaced) + len(self._handed_over)

    @property
    def num_unplaced(self) -> int:
        """Streams that wait for an engine."""
        return len(self._unplaced)

    def close(self) -> None:
        """Wait for no engine any longer."""
        self._tasks.cancel()

    def begin(self, fleet_requests: Sequence[FleetRequest]) -> None:
        """Send new streams to an engine now, or to the first one that can take them."""
        self._unplaced |= {id(r): r for r in fleet_requests}
        self._place(fleet_requests)

    def abandon(self, fleet_requests: Sequence[FleetRequest]) -> None:
        """Abort these streams: their client has left."""
        for fleet_request in fleet_requests:
            self._unplaced.pop(id(fleet_request), None)
            self._handed_over.pop(id(fleet_request), None)
            if (connection := fleet_request.connection) is not None:
                self._not_begun(fleet_request, connection)
                connection.abort_continuations([fleet_request])

    def lost(self, connection: Connection) -> None:
        """An engine has died: its streams move, and those it was computing become suspects."""
        connection.open_requests.engine_lost()
        fleet_requests = connection.fleet_requests
        connection.open_requests.clear()
        if not connection.was_leaving or fleet_requests:
            num_streams = len(fleet_requests)
            logger.error("engine %s is lost with %d streams", connection.engine_id, num_streams)
            self.moves.num_losses += 1
        for fleet_request in fleet_requests:
            self._unplace(fleet_request)
        self.place_waiting()

    def refused(self, connection: Connection, refusal: Refuse) -> None:
        """Another engine may take it; if none does, the client gets the last refusal. One that has
        waited too long ends: it would wait as long at each engine."""
        fleet_request = connection.open_requests.pop(refusal.request_id, None)
        if not isinstance(fleet_request, FleetRequest):
            return
        self._not_begun(fleet_request, connection)
        if refusal.has_waited:
            fleet_request.connection = None
            fleet_request.stream.fail(told(refusal))
        else:
            fleet_request.refused_by[connection.engine_id] = refusal
            self._unplace(fleet_request)
            self.place_waiting()

    def published(self, connection: Connection, snapshot: EngineSnapshot) -> None:
        """An engine has told how it is: what has to move because of that moves."""
        if connection.open_requests:
            if not snapshot.accepts:
                self.evacuate(connection, snapshot.state)
            elif self._rebalances:
                self.balance(connection)
        self.place_waiting()

    def evacuate(self, connection: Connection, state: EngineState) -> None:
        """The engine is rebuilding or draining: move its streams where possible.

        The others stay until its stages are rebuilt, or until they end. Called again and again,
        also as a copy ends: each time the next streams begin to be copied, or move.
        """
        if not self._routing.accepts:
            return
        fleet_requests = connection.fleet_requests
        for fleet_request in fleet_requests:
            fleet_request.forget_load()
        if state is EngineState.DRAINING and connection.is_ready:
            fleet_requests = [
                r for r in fleet_requests if r not in self._copies and not self._routing.stays(r)
            ]
            fleet_requests = self._copies.begin_leaving(fleet_requests, connection)
        self._move(fleet_requests, connection)

    def balance(self, connection: Connection) -> None:
        """Move what is late at this serving engine and would be better off at another."""
        now_s = time.monotonic()
        if now_s - connection.balanced_s < LOOKS_EVERY_S:
            return
        if not self._routing.is_late(connection.engine_id):
            return
        connection.balanced_s = now_s
        known = connection.fleet_requests
        # Suspects are tried where they are.
        movable = [r for r in known if not r.num_losses and r not in self._copies]
        # Continuations of one prompt wait for its computation together.
        begun = {id(r.stream) for r in known if r.has_started or r.has_tokens}
        waiting = [r for r in movable if id(r.stream) not in begun]
        for group, engine_id in self._routing.sooner_elsewhere(waiting, now_s):
            there = self._connections.get(engine_id)
            if there is not None and there.is_open:
                self._send(group, there, exact=True)
        running = [
            r for r in movable
            if r.has_started and r.has_tokens and r.request.sampling.prompt_logprobs is None
        ]  # fmt: skip
        self._copies.begin_relief(running, connection)

    def _copied(self, fleet_request: FleetRequest, connection: Connection) -> None:
        """It goes where its KV is; from an engine that drains, if need be, to another."""
        there = self._connections.get(fleet_request.receiver_id)
        if connection.was_leaving:
            self._move([fleet_request], connection)
            return
        if there is None or not there.is_open:
            return
        if self._routing.goes_to(fleet_request, there.engine_id):
            bits = fleet_request.bits
            self._send([fleet_request], there, exact=bits is not None and bits.batch_invariant)

    def _copy_ended(self, connection: Connection) -> None:
        connection.balanced_s = time.monotonic()
        if connection.was_leaving:
            self.evacuate(connection, EngineState.DRAINING)

    def _move(self, fleet_requests: Sequence[FleetRequest], connection: Connection) -> None:
        """From this engine to others that can take them."""
        for group, engine_id, exact in self._routing.place(fleet_requests, time.monotonic()):
            there = self._connections.get(engine_id or "")
            if there is not None and there is not connection and there.is_open:
                self._send(group, there, exact)

    def place_waiting(self) -> None:
        """Send each stream without an engine to one that can compute it, where there is one."""
        if self._unplaced:
            self._place(list(self._unplaced.values()))

    def _place(self, fleet_requests: Sequence[FleetRequest]) -> None:
        if not self._routing.accepts:
            return  # at each of many arrivals, all that wait would be routed in vain
        for group, engine_id, exact in self._routing.place(fleet_requests, time.monotonic()):
            there = self._connections.get(engine_id or "")
            if there is None or not there.is_open:
                self._refuse_if_all_have(group)
            else:
                self._send(group, there, exact)

    def end_waits(self, now_s: float) -> None:
        """Fail the streams that have waited too long for an engine."""
        for fleet_request in list(self._unplaced.values()):
            has_run = fleet_request.last_engine_id != ""
            limit_s = self._resume_within_s if has_run else self._start_within_s
            if now_s - fleet_request.waiting_since_s > limit_s:
                del self._unplaced[id(fleet_request)]
                fleet_request.stream.fail(
                    EngineUnavailable("no engine can serve now", retry_after_s=RETRY_AFTER_S)
                )

    def _hand_over(self, fleet_request: FleetRequest) -> None:
        """Its prompt is computed: another engine continues it, once it can fetch the KV. A save
        that takes longer than the prompt has costs more than to compute this again."""
        connection, now_s = fleet_request.connection, time.monotonic()
        assert connection is not None
        within_s = max(_SAVED_WITHIN_S, now_s - fleet_request.waiting_since_s)
        fleet_request.unplace(now_s)
        self._handed_over[id(fleet_request)] = fleet_request
        self._tasks.start(self._follow(fleet_request, connection, within_s))

    async def _follow(
        self, fleet_request: FleetRequest, connection: Connection, within_s: float
    ) -> None:
        try:
            await connection.ask("kv_saved", within_s=within_s)
        except (EngineUnavailable, QuestionFailed) as error:  # what is not saved is computed
            logger.warning("engine %s: %s", connection.engine_id, error)
        if self._handed_over.pop(id(fleet_request), None) is not None:  # else its client has left
            self._unplaced[id(fleet_request)] = fleet_request
            self.place_waiting()

    def _unplace(self, fleet_request: FleetRequest) -> None:
        fleet_request.unplace(time.monotonic())
        self._unplaced[id(fleet_request)] = fleet_request

    def _not_begun(self, fleet_request: FleetRequest, connection: Connection) -> None:
        """It leaves this engine: if it has not begun there, its KV is not expected there."""
        if fleet_request.prefix is not None and not fleet_request.has_started:
            self._fleet.unsent(connection.engine_id, fleet_request.prefix[1])

    def _send(self, group: Sequence[FleetRequest], to: Connection, exact: bool) -> None:
        for fleet_request in group:
            self._unplaced.pop(id(fleet_request), None)
            if fleet_request.hand_over is not None and fleet_request.has_tokens:
                self.moves.num_hand_overs += 1
                fleet_request.last_move = None
            elif fleet_request.last_engine_id in fleet_request.refused_by:
                self.moves.redirect(fleet_request, to.engine_id, exact)
            elif fleet_request.last_engine_id not in ("", to.engine_id):
                self.moves.note(fleet_request, to.engine_id, exact)
            if (left := fleet_request.connection) is not None:
                self.moves.num_balanced += left.is_ready and not left.was_leaving
                self._not_begun(fleet_request, left)
                left.abort_continuations([fleet_request])
            only_begins = self._routing.hands_over(fleet_request, to.engine_id)
            fleet_request.hand_over = self._hand_over if only_begins else None
            fleet_request.kv_saved = self._copies.kv_saved if only_begins else None
            fleet_request.receiver_id = ""
        try:
            to.submit_continuations(group)
        except (TypeError, ValueError, OverflowError) as error:  # it cannot be encoded
            self._fleet.not_sent(to.engine_id, len(group))
            for fleet_request in group:
                self._not_begun(fleet_request, to)
            group[0].stream.fail(RequestRefused(f"a value cannot be sent to the engine: {error}"))

    def _refuse_if_all_have(self, group: Sequence[FleetRequest]) -> None:
        """Fail the group if every serving engine has refused it: for its content, if it has tokens,
        as no engine refuses what another has accepted for its load (`Request.was_accepted`)."""
        serving = self._routing.serving(group[0])
        refusal = refusal_of(group[0], serving) if serving else None
        if refusal is None:
            return
        for fleet_request in group:
            if self._unplaced.pop(id(fleet_request), None) is not None:
                fleet_request.stream.fail(refusal)
