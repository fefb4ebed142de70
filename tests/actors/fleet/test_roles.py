"""Ways of dividing prompts and streams: which engine computes, which continues, and when flexible
engines do both."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.fleet.fleet import Fleet
from actors.fleet.roles import WAYS, Placement, Way, build_way
from actors.fleet.routers import build_router
from actors.fleet.snapshot import Arrival, Outlook, Role
from actors.scheduling.config import ConfigError
from actors.scheduling.request import Objective
from tests.actors.fleet.pictures import arrivals, fleet_of, fleets, outlook, snapshot

ROLES = {"p": Role.PREFILL, "d": Role.BOTH}


def way_of(name: str, router: str = "slack", **options: float) -> Way:
    return build_way(name, build_router(router), options)


@pytest.mark.parametrize("name", WAYS)
@given(fleet=fleets(), arrival=arrivals, data=st.data())
def test_prompts_and_streams_go_to_engines_of_their_role(
    name: str, fleet: Fleet, arrival: Arrival, data: st.DataObject
) -> None:
    of_way = {"colocated": [Role.BOTH], "split": [Role.PREFILL, Role.DECODE]}
    drawn = st.sampled_from(of_way.get(name, [Role.PREFILL, Role.BOTH]))
    roles = {engine: data.draw(drawn) for engine in fleet.engines}
    way = way_of(name)
    may = {engine.engine_id for engine in fleet.candidates(arrival)}
    placement = way.place(arrival, roles, fleet, 0.0)
    can_begin = any(roles[engine] is not Role.DECODE for engine in may)
    assert (placement is not None) == can_begin
    if placement is not None:
        engine_id = placement.prompt.engine_id
        assert engine_id not in arrival.refused_by
        assert roles[engine_id] is not Role.DECODE
        assert placement.moves == (not roles[engine_id].decodes)
    receiver = way.receiver(arrival, roles, fleet, 0.0)
    assert (receiver is not None) == any(roles[engine].decodes for engine in may)
    if receiver is not None:
        assert roles[receiver.engine_id].decodes


@given(fleet=fleets(), arrival=arrivals)
def test_colocated_is_the_router_and_flexible_without_prefill_engines_too(
    fleet: Fleet, arrival: Arrival
) -> None:
    there = build_router("slack").choose(arrival, fleet, 0.0)
    expected = None if there is None else Placement(there, moves=False)
    both = dict.fromkeys(fleet.engines, Role.BOTH)
    for name in ("colocated", "flexible"):
        assert str(way_of(name).place(arrival, both, fleet, 0.0)) == str(expected)  # nan != nan


def moves(fleet: Fleet, arrival: Arrival, **options: float) -> bool:
    placement = way_of("flexible", **options).place(arrival, ROLES, fleet, 0.0)
    assert placement is not None
    assert placement.moves == (placement.prompt.engine_id == "p")
    return placement.moves


def test_with_infinite_slack_a_prompt_is_computed_where_its_stream_decodes() -> None:
    fleet = fleet_of(snapshot("p", tbt_s=None), snapshot("d", tbt_s=None))
    assert not moves(fleet, Arrival(4000, 100))
    assert not moves(fleet, Arrival(4000, 100), least_slack=1.0)


def test_a_prompt_moves_where_streams_leave_no_slack_or_the_first_token_comes_sooner() -> None:
    fleet = fleet_of(snapshot("p"), snapshot("d"))
    # Half of the objective of 100 ms is left beside the decodes, whose step takes 50 ms.
    assert not moves(fleet, Arrival(100, 10), least_slack=0.4)
    assert moves(fleet, Arrival(100, 10), least_slack=0.6)
    assert moves(fleet, Arrival(100, 10, Objective(tbt_s=0.054)))
    slow = fleet_of(snapshot("p"), snapshot("d", outlook=outlook(begin_s=0.2)))
    assert moves(slow, Arrival(100, 10))  # 0.2 s instead of 0.3 s
    assert not moves(slow, Arrival(100, 10), least_gain=0.4)
    assert moves(fleet_of(snapshot("p"), snapshot("d", outlook=Outlook())), Arrival(100, 10))
    busy = fleet_of(snapshot("p", outlook=outlook(begin_s=0.2)), snapshot("d"))
    assert not moves(busy, Arrival(100, 10))


def test_a_stream_goes_on_where_there_is_room_and_its_tokens_come_soonest() -> None:
    roles = {"p": Role.PREFILL, "a": Role.DECODE, "b": Role.DECODE, "c": Role.DECODE}
    slower = replace(outlook(), tbt_s=0.06)
    fleet = fleet_of(
        snapshot("p"),
        snapshot("a", num_free_blocks=60),
        snapshot("b", outlook=slower),
        snapshot("c", outlook=slower),
    )
    way, arrival = way_of("split"), Arrival(1000, 10)
    went = []
    for _ in range(4):
        receiver = way.receiver(arrival, roles, fleet, 0.0)
        assert receiver is not None
        receiver.note_sent(1, arrival.num_tokens)
        went.append(receiver.engine_id)
    assert went == ["b", "c", "b", "c"]  # 60 blocks hold 960 tokens
    short = way.receiver(Arrival(900, 10), roles, fleet, 0.0)
    assert short is not None
    assert short.engine_id == "a"


def test_a_stream_goes_where_it_is_expected_while_there_is_room() -> None:
    roles = {"a": Role.DECODE, "b": Role.DECODE}
    fleet = fleet_of(snapshot("a"), snapshot("b", outlook=replace(outlook(), tbt_s=0.09)))
    way, arrival = way_of("split"), Arrival(1000, 10)

    def receiver(**changes: object) -> str:
        found = way.receiver(replace(arrival, **changes), roles, fleet, 0.0)
        assert found is not None
        return found.engine_id

    assert (receiver(), receiver(expected_by="b"), receiver(expected_by="gone")) == ("a", "b", "a")
    fleet.engines["b"].snapshot = snapshot("b", num_free_blocks=60)
    assert receiver(expected_by="b") == "a"


def test_streams_that_are_expected_count_where_they_will_come() -> None:
    roles = dict.fromkeys("abc", Role.DECODE)
    fleet = fleet_of(*map(snapshot, roles))
    way, expected = way_of("split"), []
    for _ in range(6):
        arrival = Arrival(1000, 10, expected=tuple(expected))
        found = way.receiver(arrival, roles, fleet, 0.0)
        assert found is not None
        expected.append((found.engine_id, 1000))
    assert [engine_id for engine_id, _ in expected] == [*"abcabc"]


def test_numbers_of_engines_that_cannot_serve_are_refused() -> None:
    assert way_of("split").roles(1, 2) == (Role.PREFILL, Role.DECODE, Role.DECODE)
    assert way_of("flexible").roles(1, 1) == (Role.PREFILL, Role.BOTH)
    assert way_of("colocated").roles(0, 2) == way_of("flexible").roles(0, 2)
    for name, numbers in {"colocated": (1, 1), "split": (0, 2), "flexible": (2, 0)}.items():
        with pytest.raises(ValueError, match=name):
            way_of(name).roles(*numbers)


def test_an_unknown_way_or_option_is_named() -> None:
    with pytest.raises(ConfigError, match="colocated, flexible, split"):
        way_of("together")
    with pytest.raises(ConfigError, match="least_slack"):
        way_of("flexible", least_slack=2.0)
    with pytest.raises(ConfigError, match="spare"):
        way_of("split", spare=1.0)
