"""Routers that keep to roles while engines of the role can take a request, and else take any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.fleet.fleet import Fleet
from actors.fleet.roles import WAYS, build_way
from actors.fleet.routers import build_router
from actors.fleet.snapshot import Arrival, EngineState, Role
from actors.fleet.way_router import WayRouter, hands_over
from tests.actors.fleet.pictures import (
    BITS,
    OTHER_BITS,
    arrivals,
    fleet_of,
    fleets,
    outlook,
    snapshot,
)

PROMPT = Arrival(100, 10)
STREAM = replace(PROMPT, has_begun=True, bits=BITS)


def router_of(way: str) -> WayRouter:
    return WayRouter(build_way(way, build_router("slack")))


def divided(**of_decode: object) -> Fleet:
    return fleet_of(snapshot("p", role=Role.PREFILL), snapshot("d", role=Role.DECODE, **of_decode))


def chosen(way: str, arrival: Arrival, fleet: Fleet) -> str | None:
    found = router_of(way).choose(arrival, fleet, 0.0)
    return None if found is None else found.engine_id


@pytest.mark.parametrize("way", WAYS)
@given(fleet=fleets(), arrival=arrivals, data=st.data())
def test_any_engine_that_may_take_it_is_better_than_none(
    way: str, fleet: Fleet, arrival: Arrival, data: st.DataObject
) -> None:
    for engine in fleet.engines.values():
        engine.snapshot = replace(engine.snapshot, role=data.draw(st.sampled_from(Role)))
    arrival = replace(arrival, has_begun=data.draw(st.booleans()))
    may = {engine.engine_id for engine in fleet.candidates(arrival)}
    found = chosen(way, arrival, fleet)
    assert (found in may) if may else (found is None)


def test_a_split_sends_prompts_here_and_streams_there() -> None:
    assert chosen("split", PROMPT, divided()) == "p"
    assert chosen("split", STREAM, divided()) == "d"


def test_a_role_is_a_preference() -> None:
    without_prefill = replace(PROMPT, refused_by=frozenset({"p"}))
    assert chosen("split", without_prefill, divided()) == "d"
    draining = divided(state=EngineState.DRAINING)
    assert chosen("split", STREAM, draining) == "p"
    assert chosen("split", STREAM, divided(bits=OTHER_BITS)) == "p"


def test_a_stream_goes_where_it_has_room() -> None:
    fleet = divided(outlook=outlook(begin_s=0.0))
    fleet.published(snapshot("e", role=Role.DECODE, num_free_blocks=2))
    assert chosen("split", STREAM, fleet) == "d"
    fleet = divided(num_running=64)
    fleet.published(snapshot("e", role=Role.DECODE))
    assert chosen("split", STREAM, fleet) == "e"


def test_an_engine_hands_over_what_another_can_continue() -> None:
    assert hands_over(PROMPT, "p", divided())
    assert not hands_over(PROMPT, "d", divided())
    assert not hands_over(PROMPT, "gone", divided())
    assert not hands_over(STREAM, "p", divided()), "it would come back again and again"
    assert not hands_over(replace(PROMPT, max_tokens=1), "p", divided())
    assert not hands_over(PROMPT, "p", divided(state=EngineState.DRAINING))
    assert not hands_over(PROMPT, "p", divided(bits=OTHER_BITS))
    small = {"num_blocks": 8, "block_size": 16, "max_model_len": 4096}
    assert hands_over(Arrival(100, 29), "p", divided(**small))
    assert not hands_over(Arrival(100, 30), "p", divided(**small)), "its stream would not fit"
    flexible = fleet_of(snapshot("p", role=Role.PREFILL), snapshot("b"))
    assert hands_over(PROMPT, "p", flexible)
    assert not hands_over(PROMPT, "b", flexible)
