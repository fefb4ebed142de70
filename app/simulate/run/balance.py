"""What is late at a simulated engine and goes on elsewhere, decided as by live fronts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from actors.fleet.balance import LOOKS_EVERY_S, is_late, relieved, sooner_elsewhere
from actors.fleet.fleet import Fleet
from actors.fleet.moves import OpenStream, StreamMove
from actors.fleet.routers.base import Router
from actors.scheduling.request import Request
from actors.scheduling.state import RequestStatus
from app.simulate.run.engine import SimulatedEngine


def leaving(
    engine: SimulatedEngine,
    fleet: Fleet,
    router: Router,
    now_s: float,
    relieve: Callable[[Sequence[OpenStream]], Sequence[StreamMove]],
) -> Iterator[tuple[OpenStream, Request, str]]:
    """What leaves this engine, which has it no longer: the stream, the request that continues it,
    and the next engine. relieve: of the streams that run, moves that the fleet counts as sent."""
    if now_s - engine.balanced_s < LOOKS_EVERY_S or not is_late(fleet.engines[engine.name], fleet):
        return
    engine.balanced_s = now_s
    live = engine.replica.core.live_requests
    found = {stream.stream_id: (stream, request) for stream, request in engine.streams()}
    streams = [stream for stream, _ in found.values() if not engine.stays(stream.stream_id)]
    waiting = [
        stream
        for stream in streams
        if not stream.sensitive and live[stream.stream_id].status is RequestStatus.WAITING
    ]
    running = [stream for stream in streams if stream.sensitive]
    for move in (*sooner_elsewhere(waiting, fleet, router, now_s), *relieve(running)):
        assert move.engine_id is not None
        engine.replica.withdraw([move.stream_id], now_s)
        yield *found[move.stream_id], move.engine_id


def relieved_at_once(
    running: Sequence[OpenStream], fleet: Fleet, router: Router, now_s: float
) -> list[StreamMove]:
    """`relieved` without KV that is shared; the fleet counts them as sent."""
    moves = relieved(running, fleet, router, now_s, ())
    arrivals = {stream.stream_id: stream.arrival for stream in running}
    for move in moves:
        assert move.engine_id is not None
        fleet.sent(move.engine_id, arrivals[move.stream_id])
    return moves
