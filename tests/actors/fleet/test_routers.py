"""Every router picks engines that may be picked; ours weighs hits against load, and promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from actors.fleet.fleet import Fleet
from actors.fleet.prefixes import PrefixIndex
from actors.fleet.routers import ROUTERS, build_router
from actors.fleet.snapshot import Arrival, EngineState, OutlookPoint, PrefixUpdate
from actors.scheduling.config import ConfigError
from actors.scheduling.request import Objective
from tests.actors.fleet.pictures import (
    BITS,
    DIGESTS,
    OTHER_BITS,
    arrivals,
    fleet_of,
    fleets,
    outlook,
    snapshot,
)


@pytest.mark.parametrize("name", ROUTERS)
@given(fleet=fleets(), arrival=arrivals)
def test_only_engines_that_serve_and_fit_are_picked(
    name: str, fleet: Fleet, arrival: Arrival
) -> None:
    may = {
        engine_id
        for engine_id, engine in fleet.engines.items()
        if engine.snapshot.state is EngineState.SERVING
        and arrival.bits in (None, engine.snapshot.bits)
        and engine_id not in arrival.refused_by
    }
    router = build_router(name)
    for _ in range(3):
        there = router.choose(arrival, fleet, 0.0)
        assert (there is None) == (not may)
        if there is None:
            return
        assert there.engine_id in may
        assert there.num_cached_tokens + there.num_new_tokens == arrival.num_tokens
        assert 0 <= there.num_cached_tokens < arrival.num_tokens
        fleet.sent(there.engine_id, arrival)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_lost_engine_is_never_picked_again_and_a_refusal_is_not_repeated(name: str) -> None:
    fleet = fleet_of(snapshot("a"), snapshot("b"), snapshot("c", state=EngineState.DRAINING))
    router = build_router(name)
    asked = Arrival(100, 10, refused_by=frozenset({"a"}))
    assert {router.choose(asked, fleet, 0.0).engine_id for _ in range(5)} == {"b"}  # type: ignore[union-attr]
    fleet.lost("b")
    assert router.choose(asked, fleet, 0.0) is None


@pytest.mark.parametrize("name", ROUTERS)
def test_a_stream_goes_to_the_engine_that_has_fetched_its_kv(name: str) -> None:
    fleet = fleet_of(snapshot("a"), snapshot("b", num_running=60), snapshot("c"))
    router, expected = build_router(name), Arrival(100, 10, expected_by="b")
    assert {router.choose(expected, fleet, 0.0).engine_id for _ in range(3)} == {"b"}  # type: ignore[union-attr]
    refused = replace(expected, refused_by=frozenset({"b"}))
    assert router.choose(refused, fleet, 0.0).engine_id in "ac"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["least_loaded", "slack"])
def test_an_engine_without_a_place_is_not_chosen_for_what_it_has_fetched(name: str) -> None:
    full = snapshot("b", num_running=60, num_waiting=4)
    fleet = fleet_of(snapshot("a"), full, snapshot("c"))
    there = build_router(name).choose(Arrival(100, 10, expected_by="b"), fleet, 0.0)
    assert there is not None
    assert there.engine_id in "ac"


@pytest.mark.parametrize("name", ["least_loaded", "power_of_two", "slack"])
def test_requests_on_their_way_count_until_a_snapshot_has_them(name: str) -> None:
    fleet = fleet_of(snapshot("a"), snapshot("b"))
    router = build_router(name)
    taken = []
    for _ in range(10):
        there = router.choose(Arrival(100, 10), fleet, 0.0)
        assert there is not None
        taken.append(there.engine_id)
        fleet.sent(there.engine_id, Arrival(100, 10))
    assert taken.count("a") == taken.count("b") == 5
    seen = snapshot("a", sequence=2, num_received=5, num_running=5, num_prefill_tokens=500)
    fleet.published(seen)
    fleet.published(snapshot("a", sequence=1))  # overtaken
    assert (fleet.engines["a"].num_live, fleet.engines["a"].num_prefill_tokens) == (5, 500)
    assert (fleet.engines["b"].num_live, fleet.engines["b"].num_prefill_tokens) == (5, 500)


@pytest.mark.parametrize("num_questions", [1, 2, 3, 4])
def test_engines_take_turns_however_often_it_is_asked(num_questions: int) -> None:
    """Quotes ask as well, and so do copies, and both roles of a divided fleet."""
    fleet = fleet_of(snapshot("a"), snapshot("b"), snapshot("c"))
    router, arrival, taken = build_router("round_robin"), Arrival(100, 10), []
    for number in range(12):
        for _ in range(num_questions):
            router.choose(replace(arrival, refused_by=frozenset({"b"})), fleet, 0.0)
            there = router.choose(arrival, fleet, 0.0)
        assert there is not None
        taken.append(there.engine_id)
        fleet.sent(there.engine_id, arrival)
        if number == 5:
            fleet.published(snapshot("d"))
            fleet.lost("c")
    assert taken == ["a", "b", "c", "a", "b", "c", "d", "a", "b", "d", "a", "b"]


def test_a_prefix_is_followed_while_it_pays() -> None:
    arrival = Arrival(200, 10, prefix=tuple(DIGESTS))  # 192 of 200 tokens in full blocks
    for begin_s, expected in ((0.1, "holds"), (0.3, "holds"), (0.46, "other")):
        # It promises a first token within twice begin_s and its own time, of the 1.0 s allowed.
        fleet = fleet_of(snapshot("other"), snapshot("holds", outlook=outlook(begin_s=begin_s)))
        fleet.update_prefixes(PrefixUpdate("holds", tuple(DIGESTS), whole=True))
        there = build_router("slack").choose(arrival, fleet, 0.0)
        assert there is not None
        assert there.engine_id == expected, begin_s
        assert there.num_cached_tokens == (192 if expected == "holds" else 0)
        held = build_router("prefix").choose(arrival, fleet, 0.0)
        assert held is not None
        assert held.engine_id == "holds"


@pytest.mark.parametrize(("num_ahead", "expected"), [(50, "other"), (150, "holds")])
def test_a_prefix_is_computed_anew_only_where_there_is_time(num_ahead: int, expected: str) -> None:
    """The engine that holds it is late; the other has 0.05 or 0.15 s of work, of 1.0 s allowed."""
    other = snapshot("other", num_running=1, num_prefill_tokens=num_ahead)
    fleet = fleet_of(other, snapshot("holds", outlook=outlook(begin_s=0.6)))
    fleet.update_prefixes(PrefixUpdate("holds", tuple(DIGESTS), whole=True))
    arrival = Arrival(200, 10, prefix=tuple(DIGESTS))
    there = build_router("slack").choose(arrival, fleet, 0.0)
    assert there is not None
    assert there.engine_id == expected
    elsewhere = build_router("slack").choose(
        replace(arrival, refused_by=frozenset({"holds"})), fleet, 0.0
    )
    assert elsewhere is not None
    assert elsewhere.engine_id == "other"


@pytest.mark.parametrize(("num_ahead", "expected"), [(50, "idle"), (500, "holds")])
def test_one_idle_engine_of_many_does_not_make_a_busy_fleet_idle(
    num_ahead: int, expected: str
) -> None:
    """Others than the late holder and the idle engine have 0.05 or 0.5 s of work."""
    others = [snapshot(f"o{n}", num_running=1, num_prefill_tokens=num_ahead) for n in range(6)]
    late = snapshot("holds", num_prefill_tokens=900, outlook=outlook(begin_s=0.6))
    fleet = fleet_of(*others, snapshot("idle"), late)
    fleet.update_prefixes(PrefixUpdate("holds", tuple(DIGESTS), whole=True))
    there = build_router("slack").choose(Arrival(200, 10, prefix=tuple(DIGESTS)), fleet, 0.0)
    assert there is not None
    assert there.engine_id == expected


def test_a_session_is_followed_where_no_prefix_is_known() -> None:
    fleet = fleet_of(snapshot("a"), snapshot("b"))
    fleet.sent("b", Arrival(500, 10, session="s"))
    fleet.published(snapshot("b", sequence=2, num_received=1))
    there = build_router("slack").choose(Arrival(600, 10, session="s"), fleet, 0.2)
    assert there is not None
    assert (there.engine_id, there.num_cached_tokens) == ("b", 500)


def test_what_one_engine_would_refuse_goes_to_one_that_can_promise() -> None:
    """The cheapest engine by work is so slow that it cannot promise; the busy one can."""
    points = (OutlookPoint(0, 5.0, 6.0), OutlookPoint(100, 6.0, 7.0))
    slow = snapshot("slow", num_running=1, num_prefill_tokens=100)
    slow = replace(slow, outlook=replace(slow.outlook, points=points))
    fast = snapshot("fast", num_running=40, num_prefill_tokens=100)
    fleet = fleet_of(slow, fast)
    router = build_router("slack")
    there = router.choose(Arrival(100, 10, Objective(None, 1.0)), fleet, 0.0)
    assert there is not None
    assert there.engine_id == "fast"
    assert there.slack >= 0.0
    relaxed = router.choose(Arrival(100, 10, Objective(None, 60.0)), fleet, 0.0)
    assert relaxed is not None
    assert relaxed.engine_id == "slow"
    assert relaxed.slack >= 0.0


def test_a_move_stays_in_its_class() -> None:
    fleet = fleet_of(snapshot("a", bits=OTHER_BITS), snapshot("b", num_running=60))
    for name in ROUTERS:
        there = build_router(name).choose(Arrival(100, 10, bits=BITS), fleet, 0.0)
        assert there is not None
        assert there.engine_id == "b"


def test_snapshots_replace_what_was_guessed() -> None:
    index = PrefixIndex()
    index.note("a", DIGESTS[:4])
    index.note("b", DIGESTS[:2])
    assert index.hits(DIGESTS) == {"a": 4, "b": 2}
    index.apply(PrefixUpdate("a", removed=(DIGESTS[3],)))
    assert index.hits(DIGESTS) == {"a": 3, "b": 2}
    index.apply(PrefixUpdate("a", added=(DIGESTS[0],), whole=True))
    assert index.hits(DIGESTS) == {"a": 1, "b": 2}
    index.forget("b")
    index.note("c", DIGESTS[:6])  # gets the place of b in the index
    assert index.hits(DIGESTS) == {"a": 1, "c": 6}
    index.forget("a")
    index.forget("c")
    assert len(index) == 0


def test_what_no_engine_confirms_is_bounded_and_forgotten() -> None:
    index = PrefixIndex()
    index.expect("a", DIGESTS[:4], most=6)
    index.expect("a", DIGESTS[:6], most=6)
    index.retract("a", DIGESTS[:4])  # the other request is still to come
    assert index.hits(DIGESTS) == {"a": 6}
    index.apply(PrefixUpdate("a", added=tuple(DIGESTS[:2])))
    index.retract("a", DIGESTS[:6])
    assert index.hits(DIGESTS) == {"a": 2}, "what the engine has confirmed stays"
    index.expect("a", DIGESTS[2:8], most=4)
    assert index.num_held("a") == 2 + 4
    assert index.hits(DIGESTS) == {"a": 2}, "the oldest are dropped"
    index.forget("a")
    index.retract("a", DIGESTS)
    assert len(index) == 0


def test_nothing_is_expected_of_an_engine_without_prefix_cache() -> None:
    fleet = fleet_of(snapshot("without", caches_prefixes=False), snapshot("with"))
    for name in fleet.engines:
        assert fleet.sent(name, Arrival(192, 8, prefix=tuple(DIGESTS))) == 0
    assert fleet.prefixes.hits(DIGESTS) == {"with": len(DIGESTS)}


def test_wrong_names_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="known: least_loaded"):
        build_router("teleport")
    with pytest.raises(ConfigError, match="routing_options"):
        build_router("prefix", {"least_share": 2.0})
    with pytest.raises(ConfigError, match="routing_options"):
        build_router("round_robin", {"seed": 1})


@pytest.mark.parametrize("name", ROUTERS)
def test_a_request_goes_where_its_adapter_is(name: str) -> None:
    """While a changed configuration rolls out, engines have other adapters in the same slot."""
    old, new = ((0, "a"), (1, "b")), ((0, "b"),)
    fleet = fleet_of(snapshot("old", adapters=old), snapshot("new", adapters=new), snapshot("bare"))

    def choose(adapter: tuple[int, str] | None) -> list[str]:
        found = fleet.candidates(Arrival(40, 8, adapter=adapter))
        chosen = build_router(name).choose(Arrival(40, 8, adapter=adapter), fleet, 0.0)
        assert (chosen is None) == (not found)
        names = [engine.engine_id for engine in found]
        assert chosen is None or chosen.engine_id in names
        return names

    assert choose((0, "a")) == ["old"]
    assert choose((0, "b")) == ["new"]
    assert choose((1, "a")) == []
    assert choose(None) == ["old", "new", "bare"]
