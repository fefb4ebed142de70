"""Streams of an engine that dies or leaves: each moves once, where its bytes stay its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from actors.fleet.fleet import Fleet
from actors.fleet.moves import OpenStream, copies, move_streams, stays
from actors.fleet.routers import ROUTERS, build_router
from actors.fleet.snapshot import Arrival, EngineSnapshot, EngineState, Outlook
from actors.scheduling.request import Objective
from tests.actors.fleet.pictures import (
    BITS,
    OTHER_BITS,
    arrivals,
    fleet_of,
    fleets,
    outlook,
    snapshot,
)

streams = st.lists(
    st.builds(lambda arrival, sensitive: (arrival, sensitive), arrivals, st.booleans()), max_size=8
)


@given(
    fleet=fleets(),
    drawn=streams,
    router=st.sampled_from(list(ROUTERS)),
    allow_inexact=st.booleans(),
)
def test_every_stream_moves_exactly_once(
    fleet: Fleet,
    drawn: list[tuple[Arrival, bool]],
    router: str,
    allow_inexact: bool,
) -> None:
    leaving = next(iter(fleet.engines), "engine-9")
    bits = fleet.engines[leaving].snapshot.bits if leaving in fleet.engines else BITS
    fleet.lost(leaving)
    open_streams = [
        OpenStream(i, leaving, arrival, bits, sensitive)
        for i, (arrival, sensitive) in enumerate(drawn)
    ]
    before = {name: engine.num_sent for name, engine in fleet.engines.items()}
    moves = move_streams(
        open_streams, fleet, build_router(router), 0.0, allow_inexact=allow_inexact
    )
    assert sorted(move.stream_id for move in moves) == list(range(len(drawn)))
    serving = {
        name: engine.snapshot.bits
        for name, engine in fleet.engines.items()
        if engine.snapshot.state is EngineState.SERVING
    }
    for move in moves:
        stream = open_streams[move.stream_id]
        free = allow_inexact or not stream.sensitive
        may = {n for n, own in serving.items() if free or own == bits} - stream.arrival.refused_by
        assert (move.engine_id is None) == (not may)
        if move.engine_id is not None:
            assert move.engine_id in may
            # Never said to be exact where it is not, nor inexact where its class was there.
            at_home = serving[move.engine_id] == bits
            assert move.exact == (at_home or not stream.sensitive)
            assert at_home or not stream.sensitive or bits not in serving.values()
    sent = {name: engine.num_sent - before[name] for name, engine in fleet.engines.items()}
    for name, count in sent.items():
        assert count == sum(move.engine_id == name for move in moves)


def test_the_tightest_objectives_choose_first_and_all_share_the_room() -> None:
    fleet = fleet_of(*[snapshot(f"{i}") for i in range(3)])
    relaxed = [OpenStream(i, "gone", Arrival(1000, 9), BITS) for i in range(4)]
    tight = OpenStream(9, "gone", Arrival(1000, 9, Objective(0.1)), BITS)
    moves = move_streams([*relaxed, tight], fleet, build_router("slack"), 0.0)
    assert moves[0].stream_id == 9
    assert {move.engine_id for move in moves[:3]} == {"0", "1", "2"}
    assert all(move.exact and move.pause_s > 0 for move in moves)


def test_a_stream_of_another_class_waits_or_is_said_to_be_inexact() -> None:
    stream = OpenStream(1, "gone", Arrival(100, 9), BITS)
    fresh = replace(stream, stream_id=2, sensitive=False)
    fleet = fleet_of(snapshot("b", bits=OTHER_BITS))
    waits, goes = move_streams([stream, fresh], fleet, build_router("slack"), 0.0)
    assert (waits.engine_id, goes.engine_id, goes.exact) == (None, "b", True)
    assert math.isnan(waits.pause_s)
    (moved,) = move_streams([stream], fleet, build_router("slack"), 0.0, allow_inexact=True)
    assert (moved.engine_id, moved.exact) == ("b", False)


def test_where_the_batch_changes_bits_a_stream_moves_and_is_said_to_be_inexact() -> None:
    """It is not kept waiting for what its class cannot give."""
    bits = replace(BITS, backend="torch", batch_invariant=False)
    stream = OpenStream(1, "gone", Arrival(100, 9), bits)
    fresh = replace(stream, stream_id=2, sensitive=False)
    fleet = fleet_of(snapshot("b", bits=bits))
    goes, begins = move_streams([stream, fresh], fleet, build_router("slack"), 0.0)
    assert (goes.engine_id, goes.exact) == ("b", False)
    assert (begins.engine_id, begins.exact) == ("b", True)
    (copied,) = copies([stream], fleet, build_router("slack"), 0.0, [])
    assert (copied.engine_id, copied.exact) == ("b", False)


def test_streams_that_end_in_time_stay_where_they_drain() -> None:
    fleet = fleet_of(snapshot("a", state=EngineState.DRAINING))  # 0.05 s a token
    short = OpenStream(1, "a", Arrival(100, 100), BITS)
    assert stays(short, fleet, left_s=5.0)
    assert not stays(short, fleet, left_s=4.9)
    assert not stays(replace(short, engine_id="gone"), fleet, left_s=5.0)


@given(
    fleet=fleets(),
    drawn=st.lists(arrivals, max_size=8),
    router=st.sampled_from(list(ROUTERS)),
    num_busy=st.integers(0, 2),
)
def test_an_engine_copies_one_stream_at_a_time(
    fleet: Fleet, drawn: list[Arrival], router: str, num_busy: int
) -> None:
    leaving = next(iter(fleet.engines), "engine-9")
    bits = fleet.engines[leaving].snapshot.bits if leaving in fleet.engines else BITS
    open_streams = [OpenStream(i, leaving, arrival, bits) for i, arrival in enumerate(drawn)]
    busy = list(fleet.engines)[1 : 1 + num_busy]
    before = {name: engine.num_sent for name, engine in fleet.engines.items()}
    begun = copies(open_streams, fleet, build_router(router), 0.0, busy)
    taken = [move.engine_id for move in begun if move.engine_id is not None]
    assert len(taken) == len(set(taken))
    assert not set(taken) & {leaving, *busy}
    named = {move.stream_id: move for move in begun}
    assert len(named) == len(begun)
    for stream in open_streams:
        arrival = stream.arrival
        may = {
            name
            for name, engine in fleet.engines.items()
            if engine.snapshot.accepts and engine.snapshot.bits == bits
        } - {leaving, *arrival.refused_by}
        move = named.get(stream.stream_id)
        assert (move is not None and move.engine_id is None) == (not may), "it need not wait"
        if move is not None and move.engine_id is not None:
            assert move.exact
            assert move.engine_id in may
    assert {name: engine.num_sent for name, engine in fleet.engines.items()} == before


def test_copies_wait_rather_than_crowd_an_engine() -> None:
    """The tightest first; a second choice must keep the time between tokens."""
    leaving = snapshot("gone", state=EngineState.DRAINING)
    slow = replace(outlook(), tbt_s=0.2)
    relaxed = [OpenStream(i, "gone", Arrival(1000, 9), BITS) for i in range(3)]
    tight = OpenStream(9, "gone", Arrival(1000, 9, Objective(0.1)), BITS)

    def begun(*engines: EngineSnapshot, busy: Sequence[str] = ()) -> dict[int, str | None]:
        fleet = fleet_of(leaving, *engines)
        streams = [*relaxed, tight]
        moves = copies(streams, fleet, build_router("slack"), 0.0, busy)
        return {move.stream_id: move.engine_id for move in moves}

    assert begun(snapshot("a"), snapshot("b")) == {9: "a", 0: "b"}
    assert begun(snapshot("a"), snapshot("b"), busy=["a"]) == {9: "b"}
    assert begun(snapshot("a"), snapshot("b", outlook=slow)) == {9: "a"}
    assert begun(snapshot("a"), snapshot("b", outlook=Outlook())) == {9: "b", 0: "a"}
    assert begun(snapshot("a"), busy=["a"]) == {}
    assert begun() == dict.fromkeys((9, 0, 1, 2))
    assert begun(snapshot("a", bits=OTHER_BITS)) == dict.fromkeys((9, 0, 1, 2))
