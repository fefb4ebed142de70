"""What is late at a simulated engine and goes on elsewhere, decided as by live fronts."""

from __future__ import annotations

from collections.abc import Iterator

from actors.fleet.balance import is_late, relieved, sooner_elsewhere
from actors.fleet.fleet import Fleet
from actors.fleet.moves import OpenStream
from actors.fleet.routers.base import Router
from actors.scheduling.request import Request
from actors.scheduling.state import RequestStatus
from app.simulate.run.engine import SimulatedEngine


def leaving(
    engine: SimulatedEngine, fleet: Fleet, router: Router, now_s: float
) -> Iterator[tuple[OpenStream, Request, str]]:
    """What leaves this engine, which has it no longer: the stream, the request that continues it,
    and the next engine."""
    if not is_late(fleet.engines[engine.name], fleet):
        return
    live = engine.replica.core.live_requests
    found = {stream.stream_id: (stream, request) for stream, request in engine.streams()}
    streams = [stream for stream, _ in found.values() if not engine.stays(stream.stream_id)]
    waiting = [
        stream
        for stream in streams
        if not stream.sensitive and live[stream.stream_id].status is RequestStatus.WAITING
    ]
    running = [stream for stream in streams if stream.sensitive]
    moves = sooner_elsewhere(waiting, fleet, router, now_s)
    for move in relieved(running, fleet, router, now_s, ()):
        assert move.engine_id is not None
        fleet.sent(move.engine_id, found[move.stream_id][0].arrival)
        moves.append(move)
    for move in moves:
        assert move.engine_id is not None
        engine.replica.withdraw([move.stream_id], now_s)
        yield *found[move.stream_id], move.engine_id
