"""Which streams move where when an engine dies or leaves.

A stream moves by recompute: its prompt and the tokens it has delivered are submitted elsewhere, and
its draws depend on (seed, position) alone. Within its class of bits that gives the bytes it would
have had; elsewhere it goes only where that is allowed, and the move says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.fleet.fleet import Fleet, Prospect
from actors.fleet.routers.base import Router
from actors.fleet.snapshot import Arrival, BitClass


@dataclass(frozen=True, slots=True)
class OpenStream:
    """An open stream, as its front knows it.

    arrival: it as it would arrive elsewhere now: num_tokens counts what it has delivered.
    bits: the class it has run in so far. sensitive: its next tokens depend on exact bits (False:
        nothing was delivered yet, so that any class gives a whole, consistent stream).
    """

    stream_id: int
    engine_id: str
    arrival: Arrival
    bits: BitClass
    sensitive: bool = True


@dataclass(frozen=True, slots=True)
class StreamMove:
    """What becomes of one stream of the engine that leaves.

    engine_id: where it goes on; None: nowhere yet. The front asks again when a snapshot comes, and
        ends the stream with an error when its own limit for that has passed.
    exact: its bytes are those of an unmoved stream.
    pause_s: until its next token, as predicted; nan: unknown.
    """

    stream_id: int
    engine_id: str | None
    exact: bool = True
    pause_s: float = math.nan


def move_streams(
    streams: Sequence[OpenStream],
    fleet: Fleet,
    router: Router,
    now_s: float,
    *,
    allow_inexact: bool = False,
) -> list[StreamMove]:
    """Where each of these goes, one move a stream; the fleet counts each as sent.

    The streams' own engine must be out of the picture (`lost`) or draining. Tightest objectives go
    first, then the shortest: a queue would delay them most, and they delay others least.
    """
    moves: list[StreamMove] = []
    for stream in sorted(streams, key=_urgency):
        refused_by = stream.arrival.refused_by | {stream.engine_id}
        arrival = replace(stream.arrival, bits=stream.bits, refused_by=refused_by)
        if not stream.sensitive:
            arrival = replace(arrival, bits=None)
        there = router.choose(arrival, fleet, now_s)
        exact = True
        if there is None and stream.sensitive and allow_inexact:
            arrival = replace(arrival, bits=None)
            there, exact = router.choose(arrival, fleet, now_s), False
        moves.append(_moved(stream, there, exact))
        if there is not None:
            fleet.sent(there.engine_id, arrival)
    return moves


def stays(stream: OpenStream, fleet: Fleet, left_s: float) -> bool:
    """Whether a stream of an engine that drains should finish there: it will be through in time.

    left_s: until the engine goes. Judged by the longest it may become, at the pace of the step
    that its engine now predicts; a stream that ends sooner has then not moved for nothing.
    """
    engine = fleet.engines.get(stream.engine_id)
    if engine is None:
        return False
    pace_s = engine.snapshot.outlook.tbt_s or engine.snapshot.tbt_s
    return pace_s is not None and 0.0 < stream.arrival.max_tokens * pace_s <= left_s


def _urgency(stream: OpenStream) -> tuple[float, int, int]:
    tbt_s = stream.arrival.objective.tbt_s
    return (math.inf if tbt_s is None else tbt_s, stream.arrival.num_tokens, stream.stream_id)


def _moved(stream: OpenStream, there: Prospect | None, exact: bool) -> StreamMove:
    if there is None:
        return StreamMove(stream.stream_id, None)
    return StreamMove(stream.stream_id, there.engine_id, exact, there.ttft_s)
