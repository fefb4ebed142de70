"""Which open requests of a serving engine go on elsewhere, because they are late where they are.

Routers balance what arrives, by what is known then. An engine that has joined since, streams that
turn out long, or a tight objective beside many streams make another engine the better place later.
A request that waits is sent elsewhere at once; a stream whose engine misses its objective is copied
there first, as from a draining engine, if the engines share KV. Engines with roles do this within
their role: prompts go to engines that compute prompts, streams to engines that decode.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from actors.fleet.fleet import PATIENCE_S, Fleet, FleetEngine, Prospect, prospect
from actors.fleet.moves import OpenStream, StreamMove, arrival_elsewhere, keeps_pace, moved, urgency
from actors.fleet.routers.base import Router
from actors.fleet.snapshot import Arrival, Role

LOOKS_EVERY_S = 0.5  # at an engine, so that the next look sees what the last moves have changed
LEAST_GAIN = 0.5  # share of its wait that a request must save to go elsewhere
LEAST_WAIT_S = 0.5  # less is left to the engine: it is about to begin
MOST_LOOKS = 16  # requests and streams of an engine that are looked at: a front has more to do
LEAST_PREFIX = 64  # cached tokens, from which on computing them again counts
LEAST_SLACK = 0.5  # of its objectives, to compute a prefix again elsewhere
LEAST_SPARE = 0.1  # share of the objective that a stream must leave free where it goes
LEAST_TOKENS = 32  # that a stream may still generate: a shorter one is over before it helps


def is_late(engine: FleetEngine, fleet: Fleet) -> bool:
    """Whether requests of this engine may be better off elsewhere: a quick look."""
    late = {False: _wait_s(engine) > LEAST_WAIT_S, True: misses_objective(engine)}
    return any(
        late[has_begun] and len(_barred(engine, fleet, has_begun)) < len(fleet.engines)
        for has_begun in late
    )


def misses_objective(engine: FleetEngine) -> bool:
    """Whether streams of this engine may be better off elsewhere: a quick look."""
    return _num_excess(engine) > 0


def sooner_elsewhere(
    waiting: Sequence[OpenStream], fleet: Fleet, router: Router, now_s: float
) -> list[StreamMove]:
    """The requests waiting at one engine that will be late there, and that another engine begins in
    time and much sooner. The fleet counts each as sent there.

    A request that is late anyway stays: elsewhere it would make others late. So does one whose
    prefix another engine would compute anew, unless that has time to spare.

    waiting: in the order in which they were sent; the last ones wait longest, so they go first.
    """
    engine = fleet.engines.get(waiting[0].engine_id) if waiting else None
    if engine is None:
        return []
    rate = engine.snapshot.outlook.prefill_rate or engine.snapshot.tokens_per_s
    barred = _barred(engine, fleet, has_begun=False)
    moves: list[StreamMove] = []
    num_behind = 0  # tokens of those that wait behind the next
    last_wait_s = _wait_s(engine)
    for stream in reversed(waiting[-MOST_LOOKS:]):
        num_behind += stream.arrival.num_tokens - stream.num_cached_tokens
        wait_s = last_wait_s - (num_behind / rate if rate else 0.0)
        if not wait_s > LEAST_WAIT_S:  # nan: unknown
            break
        left_s = stream.arrival.objective.ttft_s or engine.snapshot.ttft_s or PATIENCE_S
        left_s -= now_s - stream.arrived_s
        if not 0.0 < left_s < wait_s:
            continue
        arrival = arrival_elsewhere(stream, any_bits=not stream.sensitive)
        arrival = replace(arrival, refused_by=arrival.refused_by | barred)
        there = router.choose(arrival, fleet, now_s)
        if there is not None and _is_better(there, wait_s, left_s, stream, fleet):
            moves.append(moved(stream, there))
            fleet.sent(there.engine_id, arrival)
    return moves


def relieved(
    running: Sequence[OpenStream],
    fleet: Fleet,
    router: Router,
    now_s: float,
    busy: Collection[str],
    num_going: int = 0,
) -> list[StreamMove]:
    """The streams whose move away from an engine that misses an objective begins now: about as many
    as it must lose, and one to each engine that has room for it within all objectives there.

    busy: engines that fetch KV of another. num_going: further streams that are about to leave this
    one. The tightest objectives go first. Where no KV is shared, a stream goes only if computing it
    anew takes no longer than its objective. The fleet counts none as sent.
    """
    engine = fleet.engines.get(running[0].engine_id) if running else None
    if engine is None:
        return []
    # Every front does the same for its part of the streams.
    share = len(running) / max(engine.snapshot.num_running, len(running))
    num_left = math.ceil(share * _num_excess(engine)) - num_going
    moves: list[StreamMove] = []
    taken = _barred(engine, fleet, has_begun=True) | frozenset(busy)
    for stream in sorted(running, key=urgency)[:MOST_LOOKS]:
        if len(moves) >= num_left:
            break
        if stream.arrival.max_tokens < LEAST_TOKENS:
            continue
        arrival = arrival_elsewhere(stream)
        others = replace(arrival, refused_by=arrival.refused_by | taken)
        there = router.choose(others, fleet, now_s)
        if there is not None and _has_room(fleet.engines[there.engine_id], there, stream, fleet):
            pause_s = 0.0 if engine.snapshot.shares_kv else there.ttft_s
            if pause_s <= _objective_s(stream, engine):
                moves.append(moved(stream, there))
                taken |= {there.engine_id}
    return moves


def _barred(engine: FleetEngine, fleet: Fleet, has_begun: bool) -> frozenset[str]:
    """Engines that get nothing of this one: itself, and those of other roles. A stream that an
    engine for prompts decodes, for want of another, may go to any that decodes."""
    fitting = {engine.snapshot.role}
    if has_begun and not engine.snapshot.role.decodes:
        fitting = {role for role in Role if role.decodes}
    engines = fleet.engines.values()
    return frozenset(e.engine_id for e in engines if e is engine or e.snapshot.role not in fitting)


def _wait_s(engine: FleetEngine) -> float:
    """Until a request of one token that came now would begin; nan: unknown."""
    return prospect(engine, Arrival(1, 1)).ttft_s if engine.snapshot.num_waiting else 0.0


def _is_better(
    there: Prospect, wait_s: float, left_s: float, stream: OpenStream, fleet: Fleet
) -> bool:
    if math.isnan(there.ttft_s):  # of an engine that has computed nothing yet
        return not fleet.engines[there.engine_id].num_live
    if there.ttft_s > (1.0 - LEAST_GAIN) * wait_s or there.ttft_s > left_s:
        return False
    if there.promised_s > left_s:  # admission there would refuse it; nan: unknown
        return False
    keeps_prefix = there.num_cached_tokens >= stream.num_cached_tokens - LEAST_PREFIX
    return keeps_prefix or there.slack >= LEAST_SLACK


def _num_excess(engine: FleetEngine) -> int:
    """Streams without which the engine would keep its tightest objective."""
    outlook, more = engine.snapshot.outlook, engine.snapshot.outlook.tbt_per_stream_s
    late_s = -(engine.snapshot.least_slack_s + more)  # the slack is beside one stream more
    if not late_s > 0.0 or not outlook.tbt_s:
        return 0
    return math.ceil(late_s / more) if more > 0.0 else 1


def _has_room(engine: FleetEngine, there: Prospect, stream: OpenStream, fleet: Fleet) -> bool:
    snapshot = engine.snapshot
    coming = [num for name, num in stream.arrival.expected if name == engine.engine_id]
    num_more, num_tokens = len(engine.sent) + len(coming), engine.sent_tokens + sum(coming)
    spare_s = snapshot.least_slack_s - num_more * snapshot.outlook.tbt_per_stream_s
    spare_s -= (num_tokens + stream.arrival.num_tokens) * snapshot.outlook.tbt_per_token_s
    free = snapshot.num_free_blocks * snapshot.block_size - num_tokens
    return (
        keeps_pace(there, stream, fleet)
        and spare_s >= LEAST_SPARE * _objective_s(stream, engine)
        and engine.num_live + len(coming) < snapshot.max_requests
        and free >= 2 * stream.arrival.num_tokens  # it grows, and so do the others
    )


def _objective_s(stream: OpenStream, engine: FleetEngine) -> float:
    return stream.arrival.objective.tbt_s or engine.snapshot.tbt_s or 0.0
