"""Which streams move where when an engine dies or leaves.

A stream moves as what is known of it: its prompt and its delivered tokens are submitted to another
engine, which fetches their KV where the engines share it and computes the rest, and its draws
depend on (seed, position) alone. An engine of equal `BitClass` continues it, with the same bytes if
the class is batch-invariant; any other gets it only where inexact moves are allowed. A move that
does not assure the bytes is marked.

A stream of a draining engine that shares KV is copied first: it goes on there while the engine that
will continue it fetches its KV (`copies`), and moves when only its last tokens are missing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from actors.fleet.fleet import Fleet, Prospect
from actors.fleet.routers.base import Router
from actors.fleet.snapshot import Arrival, BitClass

FINISHES_WITHIN_S = 5.0  # streams of a draining engine that end this soon are not moved
COPIES_FOR_S = 5.0  # of a draining engine; then all streams that are left move as they are
COPIED_WITHIN_S, LAST_BLOCK_WITHIN_S = 2.0, 1.0  # then a copy ends with what is there


@dataclass(frozen=True, slots=True)
class OpenStream:
    """An open stream at its front.

    arrival: the request as another engine would get it; num_tokens includes delivered tokens.
    arrived_s: when it came. num_cached_tokens: of it, that its engine had when it got it.
    bits: the class that it has run in so far. sensitive: False if nothing was delivered yet, so
        that an engine of any class gives a consistent stream.
    """

    stream_id: int
    engine_id: str
    arrival: Arrival
    bits: BitClass
    sensitive: bool = True
    arrived_s: float = 0.0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StreamMove:
    """The new place of one stream of an engine that leaves.

    engine_id: the engine that continues it; None: none can yet. The front tries again on each
        snapshot, and ends the stream with an error after its own time limit.
    exact: its bytes are sure to be those of an unmoved stream.
    num_cached_tokens: of it, that the engine has.
    pause_s: until its next token, as predicted; nan: unknown.
    """

    stream_id: int
    engine_id: str | None
    exact: bool = True
    pause_s: float = math.nan
    num_cached_tokens: int = 0


def move_streams(
    streams: Sequence[OpenStream],
    fleet: Fleet,
    router: Router,
    now_s: float,
    *,
    allow_inexact: bool = False,
) -> list[StreamMove]:
    """One move for each of these streams; the fleet counts each as sent.

    The streams' engine must have been removed (`lost`) or be draining. The tightest objectives are
    placed first, then the shortest streams: queueing harms them most, and they delay others least.
    """
    moves: list[StreamMove] = []
    for stream in sorted(streams, key=urgency):
        arrival = arrival_elsewhere(stream, any_bits=not stream.sensitive)
        there = router.choose(arrival, fleet, now_s)
        same_class = True
        if there is None and stream.sensitive and allow_inexact:
            arrival = arrival_elsewhere(stream, any_bits=True)
            there, same_class = router.choose(arrival, fleet, now_s), False
        moves.append(moved(stream, there, same_class))
        if there is not None:
            fleet.sent(there.engine_id, arrival)
    return moves


def copies(
    streams: Sequence[OpenStream],
    fleet: Fleet,
    router: Router,
    now_s: float,
    busy: Collection[str],
) -> list[StreamMove]:
    """The streams of a draining engine whose move begins now, with a copy of their KV.

    An engine fetches for one stream at a time, so that the KV of many neither crowds its link nor
    fills its memory before they come. busy: engines that fetch for one now. A stream whose first
    choice is busy goes to another engine if that keeps its time between tokens; otherwise it waits
    for its turn and has no entry. engine_id None: no engine of equal bits can take it, so that
    waiting is of no use. The fleet counts none as sent.
    """
    begun: list[StreamMove] = []
    taken = frozenset(busy)
    for stream in sorted(streams, key=urgency):
        arrival = arrival_elsewhere(stream)
        there = router.choose(arrival, fleet, now_s)
        if there is not None and there.engine_id in taken:
            others = replace(arrival, refused_by=arrival.refused_by | taken)
            there = router.choose(others, fleet, now_s)
            if there is None or not keeps_pace(there, stream, fleet):
                continue
        begun.append(moved(stream, there))
        if there is not None:
            taken |= {there.engine_id}
    return begun


def stays(stream: OpenStream, fleet: Fleet, left_s: float) -> bool:
    """Whether a stream of a draining engine should finish there because it ends in time.

    left_s: until the engine ends. Assumes the most tokens that the stream may generate, at the
    time per token that its engine predicts.
    """
    engine = fleet.engines.get(stream.engine_id)
    if engine is None:
        return False
    pace_s = engine.snapshot.outlook.tbt_s or engine.snapshot.tbt_s
    return pace_s is not None and 0.0 < stream.arrival.max_tokens * pace_s <= left_s


def arrival_elsewhere(stream: OpenStream, any_bits: bool = False) -> Arrival:
    """The arrival of a stream at another engine: at one of its class, or at any."""
    refused_by = stream.arrival.refused_by | {stream.engine_id}
    bits = None if any_bits else stream.bits
    return replace(stream.arrival, bits=bits, refused_by=refused_by)


def urgency(stream: OpenStream) -> tuple[float, int, int]:
    """The tightest objectives first, then the shortest streams."""
    tbt_s = stream.arrival.objective.tbt_s
    return (math.inf if tbt_s is None else tbt_s, stream.arrival.num_tokens, stream.stream_id)


def keeps_pace(there: Prospect, stream: OpenStream, fleet: Fleet) -> bool:
    """Whether the stream keeps its time between tokens there, as far as is known."""
    tbt_s = stream.arrival.objective.tbt_s or fleet.engines[there.engine_id].snapshot.tbt_s
    return tbt_s is None or not there.tbt_s > tbt_s  # nan: unknown


def moved(stream: OpenStream, there: Prospect | None, same_class: bool = True) -> StreamMove:
    """The move to this engine, if there is one."""
    if there is None:
        return StreamMove(stream.stream_id, None)
    exact = not stream.sensitive or (same_class and stream.bits.batch_invariant)
    return StreamMove(
        stream.stream_id, there.engine_id, exact, there.ttft_s, there.num_cached_tokens
    )
