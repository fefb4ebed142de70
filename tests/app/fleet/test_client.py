"""What a front says of its model, as engines come, change and go."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from actors.fleet.routers import build_router
from actors.fleet.snapshot import EngineState
from actors.scheduling.events import Refuse
from actors.transport.messages import Readiness, Welcome, pack_kind
from app.engine_client.client import (
    EngineUnavailable,
    GenerationFailed,
    RequestRefused,
)
from app.fleet.client import FleetClient
from app.fleet.connection import Connection, FleetRequest
from app.fleet.registry import EngineEntry
from tests.actors.fleet.pictures import snapshot
from tests.app.fleet.paper_fleet import Finder, Wire, ask, front


def joined(client: FleetClient, name: str) -> Connection:
    """A connection to this engine, which is open and has sent nothing but its welcome."""
    connection = Connection(EngineEntry(name, "node", "@", None, b"", 1), "node", client)
    connection.welcome = Welcome(1, 0.0, 11, (2,), 100)
    unused: Any = object()
    connection._socket = unused  # it is open; nothing is sent
    client.joined(connection)
    return connection


def test_a_request_may_have_what_one_of_the_engines_holds() -> None:
    """Of 4096 tokens of context: more would be refused by every engine."""
    client = front()
    connections = {name: joined(client, name) for name in ("small", "large")}

    def published(name: str, sequence: int, **changes: Any) -> int:
        blocks = {"small": 100, "large": 200}[name]
        fields = {"num_blocks": blocks, "max_model_len": 4096, "sequence": sequence, **changes}
        client.published(connections[name], snapshot(name, **fields))
        return client.card.max_model_len

    assert published("small", 1) == 1600
    assert published("large", 1) == 3200
    assert published("small", 2) == 3200
    assert published("large", 2, state=EngineState.DRAINING) == 1600  # it takes no new request
    assert published("large", 3, num_blocks=1000) == 4096
    client.lost(connections["large"])
    assert client.card.max_model_len == 1600
    assert published("small", 3, state=EngineState.STARTING) == 1600
    client.lost(connections["small"])
    assert client.card.max_model_len == 1600  # of an engine that is started for a request
    assert client.card.vocab_size == 11


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_fleet_that_falls_asleep_is_ready_all_the_time(sleeps: bool) -> None:
    client = front(sleeps=sleeps)
    assert not client.is_ready()  # the model's limits are not known yet
    last = joined(client, "last")
    for number, state in enumerate(("serving", "draining"), 1):
        client.published(last, snapshot("last", sequence=number, state=EngineState(state)))
        assert client.is_ready() == (sleeps or state == "serving")
    client.lost(last)
    assert client.is_ready() == sleeps
    first = joined(client, "first")
    client.published(first, snapshot("first", state=EngineState.STARTING))
    assert not client.is_ready()  # its stages are lost


def test_an_engine_that_dies_as_it_joins_is_found_again() -> None:
    client = front()
    connection = joined(client, "engine")
    connection._lost()
    client.joined(connection)  # the finder is told of the loss later than of the welcome
    assert not client.is_connected("engine")


class Hung(Finder):
    """The cluster's store does not answer."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()

    def start(self, owner: object) -> None: ...

    async def refreshed(self) -> None: ...

    async def report_waiting(self, count: int) -> None:
        self.is_asked.set()
        await asyncio.Event().wait()

    async def close(self) -> None: ...


async def test_waits_are_bounded_while_the_clusters_store_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.fleet.client._WATCH_PERIOD_S", 0.0)
    finder: Any = Hung()
    client = FleetClient(
        finder, "name", "folder", build_router("slack"), sleeps=True, start_within_s=0.0
    )
    async with asyncio.timeout(30):
        await client.start()
        await finder.is_asked.wait()
        with pytest.raises(EngineUnavailable):
            await ask(client, (1, 2, 3), 2)
    await client.close()


@pytest.mark.parametrize("moves", [False, True])
async def test_time_in_the_queue_of_an_engine_that_dies_is_no_wait_for_one(moves: bool) -> None:
    client = front("round_robin", rebalance=False)
    wires = [Wire(client, name, number) for number, name in enumerate("ab"[: 1 + moves], 1)]
    for wire in wires:
        wire.carry()
    asked = asyncio.create_task(ask(client, (1, 2, 3), 8))
    await asyncio.sleep(0)
    (queued,) = wires[0].connection.open_requests.values()
    assert isinstance(queued, FleetRequest)
    queued.waiting_since_s -= 500.0  # it came then, and was sent at once
    queued.placed_s -= 500.0
    placement = client._placement
    if moves:
        placement._send([queued], wires[1].connection, exact=True)
        client.lost(wires[0].connection)
    client.lost(wires[-1].connection)
    placement.end_waits(time.monotonic())
    placement.end_waits(time.monotonic() + 110.0)  # longer than for a first engine
    assert placement.num_unplaced == 1
    placement.end_waits(time.monotonic() + 121.0)
    (end,) = await asyncio.gather(asked, return_exceptions=True)
    assert isinstance(end, EngineUnavailable)


async def test_what_engines_refuse_is_no_move() -> None:
    client = front("round_robin", rebalance=False)
    wires = [Wire(client, name, number) for number, name in enumerate("abc", 1)]
    for wire in wires:
        wire.carry()
    asked = asyncio.create_task(ask(client, (1, 2, 3), 2))
    await asyncio.sleep(0)
    (request_id,) = wires[0].connection.open_requests
    refusal = Refuse(request_id, "the queue is full", None, 1.0)
    wires[0].connection._received(pack_kind(refusal))
    assert [len(wire.connection.open_requests) for wire in wires] == [0, 1, 0]
    assert client.moves.num_moves == 0
    client.lost(wires[1].connection)  # its engine has died
    assert [len(wire.connection.open_requests) for wire in wires] == [0, 0, 1]
    assert client.moves.num_moves == 1
    asked.cancel()


@pytest.mark.parametrize("ends", ["refused", "aborted"])
async def test_a_request_that_no_engine_begins_leaves_no_prefix(ends: str) -> None:
    client = front("round_robin", rebalance=False)
    wires = [Wire(client, name, number, prefix_cache=True) for number, name in enumerate("ab", 1)]
    for wire in wires:
        wire.carry()
    asked = asyncio.create_task(ask(client, tuple(range(40)), 8))
    await asyncio.sleep(0)
    assert len(client._fleet.prefixes) == 10
    if ends == "aborted":
        asked.cancel()
    for connection in [wire.connection for wire in wires] if ends == "refused" else ():
        (request_id,) = connection.open_requests
        connection._received(pack_kind(Refuse(request_id, "the queue is full", None, 1.0)))
    (end,) = await asyncio.gather(asked, return_exceptions=True)
    assert isinstance(end, RequestRefused if ends == "refused" else asyncio.CancelledError)
    assert len(client._fleet.prefixes) == 0


async def test_one_that_has_waited_too_long_leaves_the_prefix_to_others() -> None:
    client = front("round_robin", rebalance=False)
    wires = [Wire(client, name, number, prefix_cache=True) for number, name in enumerate("ab", 1)]
    for wire in wires:
        wire.carry()
    asked = [asyncio.create_task(ask(client, tuple(range(40)), 8)) for _ in range(4)]
    await asyncio.sleep(0)
    first, _ = wires[0].connection.open_requests
    late = Refuse(first, "it has waited too long", None, 1.0, has_waited=True)
    wires[0].connection._received(pack_kind(late))
    (ended,), others = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert isinstance(ended.exception(), RequestRefused)
    assert client._fleet.prefixes.num_held("a") == 10
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    assert len(client._fleet.prefixes) == 0


async def test_a_request_that_kills_the_stages_of_each_engine_ends_at_the_third() -> None:
    """Though its front takes it to another engine before the stages are there again."""
    client = front("round_robin", rebalance=False)
    wires = [Wire(client, name, number) for number, name in enumerate("abcd", 1)]
    for wire in wires:
        wire.carry()
    culprit = (6, 6, 6)
    others = [(n, 5, 4, 3) for n in range(8)]
    asked = [asyncio.create_task(ask(client, prompt, 8)) for prompt in (culprit, *others)]
    num_deaths, is_quiet = 0, False
    while not is_quiet:
        await asyncio.sleep(0)
        is_quiet = True
        for wire in wires:
            core, stages = wire.engine.core, wire.engine.stages
            while wire.carry():
                is_quiet = False
                await asyncio.sleep(0)
            if not stages.unanswered or wire.engine.loop._recovery.is_rebuilding:
                continue
            is_quiet = False
            step = stages.unanswered[0].named_slices
            live = [core.live_requests[part.request_id].request.prompt for part in step]
            if culprit in live:
                num_deaths += 1
                assert num_deaths <= 3
                stages.may_go_on.clear()
                stages.lose("a stage died")
                await asyncio.sleep(0)
                assert Readiness(False) in wire.engine.told(Readiness)
            else:
                stages.answer()
    ended = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(ended[0], GenerationFailed)
    assert str(ended[0]) == "the engine fails whenever this request runs"
    assert [len(tokens) for tokens in ended[1:] if isinstance(tokens, list)] == [8] * len(others)
    assert num_deaths == 3
    for wire in wires:  # those that were lost end it too once they are there again
        wire.engine.stages.may_go_on.set()
        await asyncio.gather(*wire.engine.loop._tasks._tasks)
        while wire.carry():
            pass
        wire.engine.check_empty()
