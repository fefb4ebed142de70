"""How long streams that change engines wait for KV and for engines, and how moves are counted."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from actors.scheduling.events import Refuse
from actors.scheduling.request import Request, SamplingParams
from actors.transport.messages import Readiness, pack_kind
from app.engine_client.client import (
    EngineUnavailable,
    GenerationFailed,
    GenerationRequest,
    RequestRefused,
)
from app.engine_client.streams import OpenRequests, Stream
from app.fleet.connection import FleetRequest
from app.fleet.routing import FleetRouting
from app.fleet.stream_placement import StreamPlacement
from tests.actors.fleet.pictures import OTHER_BITS, outlook, snapshot
from tests.app.fleet.paper_fleet import Wire, ask, front


class Engine:
    """A connection whose engine saves nothing in time, and what it was asked."""

    engine_id = "here"

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []

    async def ask(self, question: str, *, within_s: float) -> None:
        self.asked.append((question, within_s))
        raise EngineUnavailable("not in time")


@pytest.mark.parametrize("took_s", [0.1, 30.0])
async def test_a_save_may_take_as_long_as_its_prompt_took(took_s: float) -> None:
    engine: Any = Engine()
    request = Request(1, (5, 6), SamplingParams(9), 0.0)
    stream = FleetRequest(request, 0, Stream(), connection=engine)
    stream.waiting_since_s = time.monotonic() - took_s
    nothing: Any = None
    placement = StreamPlacement(
        nothing, nothing, {}, start_within_s=1.0, resume_within_s=1.0, rebalance=False
    )
    placed = asyncio.Event()
    placement.place_waiting = placed.set  # type: ignore[method-assign]
    placement._hand_over(stream)
    await placed.wait()
    ((question, within_s),) = engine.asked
    assert question == "kv_saved"
    assert within_s >= max(2.0, took_s)
    assert stream.connection is None


async def test_a_stream_whose_client_leaves_while_its_kv_is_saved_goes_on_nowhere() -> None:
    engine: Any = Engine()
    request = Request(1, (5, 6), SamplingParams(9), 0.0)
    stream = FleetRequest(request, 0, Stream(), connection=engine)
    nothing: Any = None
    placement = StreamPlacement(
        nothing, nothing, {}, start_within_s=1.0, resume_within_s=1.0, rebalance=False
    )
    placement._hand_over(stream)
    assert placement.num_open == 1
    placement.abandon([stream])
    await asyncio.gather(*placement._tasks._tasks)
    assert engine.asked
    assert placement.num_open == 0


async def test_a_request_whose_client_leaves_while_it_waits_is_sent_nowhere() -> None:
    client = front("round_robin", rebalance=False)
    wire = Wire(client, "a", 1)
    publication = wire.engine.loop.publication
    assert publication is not None
    publication.computes(False)
    wire.carry()
    asked = asyncio.create_task(ask(client, (1, 2, 3), 8))
    await asyncio.sleep(0)
    assert client.num_open == 1
    asked.cancel()
    await asyncio.wait([asked])
    assert client.num_open == 0
    publication.computes(True)
    wire.carry()
    assert not wire.connection.open_requests


@pytest.mark.parametrize("has_waited", [True, False])
async def test_a_request_that_has_waited_too_long_waits_at_no_other_engine(
    has_waited: bool,
) -> None:
    engine: Any = Engine()
    engine.open_requests = OpenRequests()
    stream = Stream()
    stream.num_open = 1
    waiting = FleetRequest(Request(1, (5, 6), SamplingParams(9), 0.0), 0, stream, connection=engine)
    engine.open_requests[1] = waiting
    nothing: Any = None
    placement = StreamPlacement(
        nothing, nothing, {}, start_within_s=1.0, resume_within_s=1.0, rebalance=False
    )
    asked: list[int] = []
    placement.place_waiting = lambda: asked.append(placement.num_unplaced)  # type: ignore[method-assign]
    placement.refused(engine, Refuse(1, "waited 10 s", None, 1.0, has_waited=has_waited))
    assert not engine.open_requests
    assert asked == ([] if has_waited else [1])
    if has_waited:
        assert placement.num_unplaced == 0
        with pytest.raises(RequestRefused, match="waited 10 s") as caught:
            await stream.get()
        assert caught.value.retry_after_s == 1.0


async def test_a_move_counts_as_inexact_where_it_ends_and_not_where_it_is_refused() -> None:
    """The stream's tokens are those of `a` until another engine adds to them."""
    client = front("round_robin", rebalance=False, allow_inexact=True)
    wires = {"a": Wire(client, "a", 1), "b": Wire(client, "b", 2)}
    for number, name in enumerate("cd", 3):
        wires[name] = Wire(client, name, number, bits=OTHER_BITS)

    def refuse_at(name: str) -> None:
        ((request_id, moving),) = wires[name].connection.open_requests.items()
        assert moving is stream
        wires[name].connection._received(pack_kind(Refuse(request_id, "the prompt is too long")))

    def moves() -> tuple[int, int, list[tuple[str, str, bool]]]:
        told = client.moves.to_dict()
        latest = [(move["from"], move["to"], move["exact"]) for move in told["latest_moves"]]
        return told["num_moves"], told["num_inexact_moves"], latest

    for wire in wires.values():
        wire.carry()
    asked = asyncio.create_task(ask(client, (1, 2, 3), 8))
    await asyncio.sleep(0)
    (stream,) = wires["a"].connection.open_requests.values()
    while not stream.delivered:
        wires["a"].carry()
        wires["a"].engine.stages.answer()
    client.lost(wires["a"].connection)
    assert moves() == (1, 0, [("a", "b", True)])
    refuse_at("b")
    assert moves() == (1, 1, [("a", "c", False)])
    wires["e"] = Wire(client, "e", 5)
    wires["e"].carry()
    refuse_at("c")
    assert moves() == (1, 0, [("a", "e", True)])
    client.lost(wires["e"].connection)
    assert moves() == (2, 1, [("a", "e", True), ("e", "d", False)])
    asked.cancel()


@pytest.mark.parametrize("leaves", ["dies", "drains"])
async def test_what_was_accepted_goes_to_an_engine_that_was_too_busy_for_it(leaves: str) -> None:
    client = front("round_robin", rebalance=False)
    wires = [Wire(client, name, number) for number, name in enumerate("ab", 1)]
    for wire in wires:
        wire.carry()
    asked = asyncio.create_task(ask(client, (1, 2, 3), 8))
    await asyncio.sleep(0)
    ((request_id, stream),) = wires[0].connection.open_requests.items()
    wires[0].frames.clear()
    refusal = Refuse(request_id, "the queue is full", None, 1.0)
    wires[0].connection._received(pack_kind(refusal))
    while len(stream.delivered) < 3:
        wires[1].carry()
        wires[1].engine.stages.answer()
    if leaves == "dies":
        client.lost(wires[1].connection)
    else:
        publication = wires[1].engine.loop.publication
        assert publication is not None
        publication.leave()
        wires[1].carry()
    assert list(wires[0].connection.open_requests.values()) == [stream]
    while wires[0].carry() or wires[0].engine.stages.unanswered:
        wires[0].engine.stages.answer()
        await asyncio.sleep(0)
    assert len(await asked) == 8


async def test_a_stream_of_a_leaving_engine_stays_where_no_other_can_hold_it() -> None:
    client = front("round_robin", rebalance=False)
    wires = [Wire(client, name, number) for number, name in enumerate("ab", 1)]
    for wire in wires:
        wire.carry()
    asked = asyncio.create_task(ask(client, (1, 2, 3), 8))
    await asyncio.sleep(0)
    ((request_id, stream),) = wires[0].connection.open_requests.items()
    wires[0].connection._received(pack_kind(Refuse(request_id, "the prompt is too long")))
    wires[1].carry()
    publication = wires[1].engine.loop.publication
    assert publication is not None
    publication.leave()
    wires[1].carry()
    assert list(wires[1].connection.open_requests.values()) == [stream]
    asked.cancel()


async def test_requests_that_wait_for_an_engine_are_routed_once_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each arrival and each snapshot would cost as much as all that wait."""
    routed: list[int] = []
    place = FleetRouting.place

    def counted(self: FleetRouting, fleet_requests: Any, now_s: float) -> Any:
        routed.append(len(fleet_requests))
        return place(self, fleet_requests, now_s)

    monkeypatch.setattr(FleetRouting, "place", counted)
    client = front("round_robin", rebalance=False)
    wire = Wire(client, "a", 1)
    publication = wire.engine.loop.publication
    assert publication is not None
    publication.computes(False)
    wire.carry()
    asked = [asyncio.create_task(ask(client, (n, 2, 3), 1)) for n in range(20)]
    await asyncio.sleep(0)
    client._placement.place_waiting()
    publication.publish()
    wire.carry()
    assert (client._placement.num_unplaced, routed) == (20, [])
    publication.computes(True)
    wire.carry()
    assert (client._placement.num_unplaced, routed) == (0, [20])
    asked.append(asyncio.create_task(ask(client, (20, 2, 3), 1)))
    await asyncio.sleep(0)
    publication.computes(False)
    wire.carry()  # its streams find no other place
    assert routed == [20, 1]
    for task in asked:
        task.cancel()


async def test_what_cannot_be_sent_does_not_count_as_sent() -> None:
    client = front("round_robin", rebalance=False)
    wires = [Wire(client, name, number, prefix_cache=True) for number, name in enumerate("ab", 1)]
    for wire in wires:
        wire.carry()
    sampling = SamplingParams(8, seed=1 << 70)  # of more bits than a message's numbers have
    request = GenerationRequest("id", tuple(range(40)), sampling, n=2)
    with pytest.raises(RequestRefused, match="cannot be sent"):
        async for _ in client.generate(request):
            pass
    engines = client._fleet.engines.values()
    assert [(e.num_sent, e.num_live, e.sent_tokens) for e in engines] == [(0, 0, 0)] * 2
    assert len(client._fleet.prefixes) == 0


async def test_an_engine_that_ends_as_it_rebuilds_its_stages_is_one_loss() -> None:
    """Nothing has run since the stages were lost, and that is held against the stream already."""
    client = front("round_robin", rebalance=False)
    wire = Wire(client, "a", 1)
    wire.carry()
    asked = asyncio.create_task(ask(client, (1, 2, 3), 8))
    await asyncio.sleep(0)
    (stream,) = wire.connection.open_requests.values()
    wire.carry()
    wire.engine.stages.may_go_on.clear()
    wire.engine.stages.lose("a stage died")
    await asyncio.sleep(0)  # the rebuild begins
    assert wire.engine.told(Readiness)
    wire.carry()
    assert stream.num_losses == 1
    client.lost(wire.connection)
    assert stream.num_losses == 1
    asked.cancel()


async def test_a_request_that_kills_every_engine_takes_three_with_it() -> None:
    client = front("round_robin", rebalance=False)
    wires = [Wire(client, name, number) for number, name in enumerate("abcd", 1)]
    for wire in wires:
        wire.carry()
    asked = asyncio.create_task(ask(client, (1, 2, 3), 8))
    await asyncio.sleep(0)
    for wire in wires[:3]:
        assert len(wire.connection.open_requests) == 1
        while wire.carry():  # its first step is under way, and its front knows
            pass
        assert wire.engine.stages.unanswered
        client.lost(wire.connection)
    (end,) = await asyncio.gather(asked, return_exceptions=True)
    assert isinstance(end, GenerationFailed)
    assert not wires[3].connection.open_requests
    assert client.num_open == 0


async def test_what_waits_at_a_late_engine_goes_once_to_one_that_has_just_joined() -> None:
    """But those that run, and those that may have killed an engine: these are tried where they
    are."""
    client = front("slack")
    late = Wire(client, "late", 1, max_requests=2)
    late.carry()
    asked = [asyncio.create_task(ask(client, (n, 2, 3), 4)) for n in range(8)]
    await asyncio.sleep(0)
    while late.carry():
        pass
    streams = late.connection.fleet_requests
    running, suspect = [r for r in streams if r.has_started], streams[-1]
    assert running
    suspect.num_losses = 1
    joined = Wire(client, "joined", 2)
    joined.carry()
    told = {"sequence": 100, "ttft_s": 1000.0}
    client.published(joined.connection, snapshot("joined", **told))
    queue = outlook(begin_s=5000.0)
    client.published(
        late.connection, snapshot("late", **told, num_waiting=6, num_received=8, outlook=queue)
    )
    stays = late.connection.fleet_requests
    gone = joined.connection.fleet_requests
    assert sorted(map(id, [*stays, *gone])) == sorted(map(id, streams))
    assert gone
    assert all(r in stays for r in (suspect, *running))
    for _ in range(100):
        for wire in (late, joined):
            wire.carry()
            wire.engine.stages.answer()
        await asyncio.sleep(0)
    assert [len(tokens) for tokens in await asyncio.gather(*asked)] == [4] * 8
    assert client.moves.num_balanced == client.moves.num_moves == len(gone)
    for wire in (late, joined):
        wire.engine.check_empty()
