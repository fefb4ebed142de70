"""Where every stream of a front is computed: sent, refused, moved, waiting, given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from actors.fleet.fleet import Fleet
from actors.fleet.snapshot import EngineState
from actors.scheduling.events import Refuse
from app.engine.client import EngineUnavailable, RequestRefused
from app.fleet.connection import Connection, Traveller
from app.fleet.overview import StreamMoves
from app.fleet.placement import Placement, refusal_of

logger = logging.getLogger("legato.fleet")

RETRY_AFTER_S = 5.0  # while no engine can serve


class Whereabouts:
    """connections: engines that this front can reach, kept by `app.fleet.client`.

    start_within_s, resume_within_s: what a request waits for its first engine, and a stream that
    has lost its engine for another.
    """

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        connections: dict[str, Connection],
        start_within_s: float,
        resume_within_s: float,
    ) -> None:
        self._fleet = fleet
        self._placement = placement
        self._connections = connections
        self._start_within_s = start_within_s
        self._resume_within_s = resume_within_s
        self._nowhere: dict[int, Traveller] = {}  # by identity
        self.moves = StreamMoves()

    @property
    def num_open(self) -> int:
        return sum(len(c.open) for c in self._connections.values()) + len(self._nowhere)

    @property
    def num_nowhere(self) -> int:
        """Those that wait for an engine that can compute them."""
        return len(self._nowhere)

    def begin(self, travellers: Sequence[Traveller]) -> None:
        """New ones: they go to an engine now, or to the first that will have them."""
        self._nowhere |= {id(t): t for t in travellers}
        self.settle()

    def abandon(self, travellers: Sequence[Traveller]) -> None:
        """Their client has left, wherever they are."""
        for traveller in travellers:
            self._nowhere.pop(id(traveller), None)
            if traveller.home is not None:
                traveller.home.give_up([traveller])

    def lost(self, connection: Connection) -> None:
        """An engine has died: its streams go on elsewhere, held to account as its suspects."""
        connection.open.engine_lost()
        travellers = [t for t in connection.open.values() if isinstance(t, Traveller)]
        connection.open.clear()
        if not connection.was_leaving or travellers:
            logger.error("engine %s is lost with %d streams", connection.engine_id, len(travellers))
            self.moves.num_losses += 1
        for traveller in travellers:
            self._uproot(traveller)
        self.settle()

    def refused(self, connection: Connection, refusal: Refuse) -> None:
        """Another engine may take it; if none does, the client is told what the last one said."""
        traveller = connection.open.pop(refusal.request_id, None)
        if isinstance(traveller, Traveller):
            traveller.refused_by.add(connection.engine_id)
            traveller.refusal = refusal
            self._uproot(traveller)
            self.settle()

    def evacuate(self, connection: Connection, state: EngineState) -> None:
        """Its engine computes nothing at present, or leaves: streams go elsewhere, if they can.
        Those that cannot stay until it has rebuilt its stages, or to their end."""
        travellers = [t for t in connection.open.values() if isinstance(t, Traveller)]
        if state is EngineState.DRAINING:
            travellers = [t for t in travellers if not self._placement.stays(t)]
        for party, engine_id, exact in self._placement.place(travellers, time.monotonic()):
            there = self._connections.get(engine_id or "")
            if there is not None and there is not connection and there.is_open:
                self._send(party, there, exact)

    def settle(self) -> None:
        """Send what is nowhere to where it can be computed, as far as there is such a place."""
        if not self._nowhere:
            return
        now_s = time.monotonic()
        for party, engine_id, exact in self._placement.place(list(self._nowhere.values()), now_s):
            there = self._connections.get(engine_id or "")
            if there is None or not there.is_open:
                self._refuse_if_all_have(party)
            else:
                self._send(party, there, exact)

    def end_waits(self, now_s: float) -> None:
        """Tell those who have waited too long."""
        for traveller in list(self._nowhere.values()):
            limit_s = self._resume_within_s if traveller.was_at else self._start_within_s
            if now_s - traveller.waiting_since_s > limit_s:
                del self._nowhere[id(traveller)]
                traveller.stream.fail(
                    EngineUnavailable("no engine can serve now", retry_after_s=RETRY_AFTER_S)
                )

    def _uproot(self, traveller: Traveller) -> None:
        traveller.uproot(time.monotonic())
        self._nowhere[id(traveller)] = traveller

    def _send(self, party: Sequence[Traveller], to: Connection, exact: bool) -> None:
        for traveller in party:
            self._nowhere.pop(id(traveller), None)
            if traveller.was_at:
                self.moves.note(traveller, to.engine_id, exact)
            if traveller.home is not None:
                traveller.home.give_up([traveller])
        try:
            to.take(party)
        except (TypeError, ValueError, OverflowError) as error:  # what no message can carry
            party[0].stream.fail(RequestRefused(f"a value cannot be sent to the engine: {error}"))

    def _refuse_if_all_have(self, party: Sequence[Traveller]) -> None:
        """Every engine that serves has refused it. A stream that was only too much at the time
        waits instead, and asks again."""
        serving = [s for s in self._fleet.engines.values() if s.snapshot.accepts]
        refusal = refusal_of(party[0], serving) if serving else None
        if refusal is None:
            return
        for traveller in party:
            if traveller.has_tokens and refusal.retry_after_s is not None:
                traveller.refused_by.clear()
            elif self._nowhere.pop(id(traveller), None) is not None:
                traveller.stream.fail(refusal)
