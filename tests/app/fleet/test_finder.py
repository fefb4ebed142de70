"""How a front finds its engines, and lets others be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine.peers import FrontAddress, Peers
from actors.fleet.routers import build_router
from actors.transport.addresses import new_local_address, new_secret
from actors.transport.messages import Welcome, pack_kind
from app.fleet.client import FleetClient
from app.fleet.finder import Finder
from app.fleet.registry import EngineEntry, Member, Registry
from tests.actors.fleet.pictures import snapshot
from tests.app.fleet.live.waiting import until
from tests.app.fleet.test_adapters import Store


class Scheduler:
    """Accepts fronts, and publishes that it serves."""

    def __init__(self, registry: Registry, name: str, serves: str) -> None:
        self.member = Member(registry, name, tcp=False, serves=serves)
        self.fronts = FrontAddress(name, new_local_address(), None, new_secret())
        self.peers = Peers(lambda number, message: None, lambda number: None)

    def welcome(self, number: int) -> Welcome:
        published = snapshot(self.fronts.engine_id)
        asyncio.get_running_loop().call_soon(self.peers.publish, published, number)
        return Welcome(number, 0.0, 11, (2,), 100)

    async def join(self) -> None:
        await self.peers.listen(self.fronts, self.welcome)
        await self.member.join(self.fronts, None)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr("app.fleet.registry.internal_kv", made)
    return made


@pytest.fixture
def registry(store: Store, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr("app.fleet.registry.this_node", lambda: "node")
    return Registry("app/Engine")


Make = Callable[..., Any]


@pytest.fixture
async def scheduler(registry: Registry) -> AsyncIterator[Make]:
    made: list[Scheduler] = []

    def make(name: str, serves: str = "") -> Scheduler:
        made.append(Scheduler(registry, name, serves))
        return made[-1]

    yield make
    for each in made:
        each.peers.close_fronts()


@pytest.fixture
async def front(registry: Registry) -> AsyncIterator[Make]:
    made: list[FleetClient] = []

    def make(serves: str = "") -> FleetClient:
        finder = Finder(registry, "node", serves)
        made.append(FleetClient(finder, "name", "folder", build_router("slack")))
        return made[-1]

    yield make
    for client in made:
        await client.close()


async def test_a_front_of_a_new_model_leaves_clients_to_the_old_ones_until_it_has_an_engine(
    scheduler: Make, front: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "legato.fleet")
    old, new = scheduler("old", "model 1"), scheduler("new", "model 2")
    await old.join()
    fronts = front("model 1"), front("model 2")
    await fronts[0].start()
    starting = asyncio.create_task(fronts[1].start())
    for _ in range(2):
        fronts[1]._finder._refreshed.clear()
        fronts[1]._finder.refresh()
        await fronts[1]._finder.refreshed()
    assert not starting.done()
    assert not fronts[1].is_connected("old")
    await new.join()
    assert await old.member.is_replaced()  # it stays a while for its front
    assert not await new.member.is_replaced()  # by one that was there before
    assert old.peers.num_fronts == 1
    assert not await scheduler("loading", "model 3").member.is_replaced()  # no front knows it
    for one in fronts:
        one._finder.refresh()
    await starting
    assert fronts[1].is_ready()
    await until(lambda: set(fronts[0]._finder.others) == {"new"})
    assert [one.engine_id for client in fronts for one in client.connections] == ["old", "new"]
    assert caplog.text.count("is not used") == 2  # once each
    assert caplog.text.count("waits for engines that serve model 2: there are 0 of 1") == 1


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_front_of_a_new_model_starts_once_that_has_as_many_engines(
    scheduler: Make, front: Make, leaves: bool
) -> None:
    """The first one alone would get the requests of all."""
    olds = [scheduler(f"old {number}", "model 1") for number in range(2)]
    news = [scheduler(f"new {number}", "model 2") for number in range(2)]
    for each in (*olds, news[0]):
        await each.join()
    client = front("model 2")
    starting = asyncio.create_task(client.start())
    await until(client.is_ready)
    await until(lambda: len(client._finder.others) == 2)
    assert not starting.done()
    await (olds[0].member.part() if leaves else news[1].join())
    client._finder.refresh()
    await starting
    assert len(client.connections) == (1 if leaves else 2)


async def test_entries_that_nobody_drops_keep_no_front_from_starting(
    registry: Registry, scheduler: Make, front: Make
) -> None:
    for number in range(2):
        await registry.put(EngineEntry(f"old {number}", "node", "@", None, b"", 1))
    client, engine = front("model"), scheduler("new", "model")
    starting = asyncio.create_task(client.start())
    await until(lambda: len(client._finder.others) == 2)
    assert not starting.done()
    await engine.join()
    client._finder.refresh()
    await starting


async def test_a_front_waits_for_no_engine_where_none_serves_another_model(front: Make) -> None:
    client = front("model")
    await client.start()
    assert not client.is_ready()


async def test_an_engine_whose_connection_has_ended_is_tried_again_after_a_pause(
    registry: Registry, scheduler: Make, front: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes its place is found at once."""
    monkeypatch.setattr("app.fleet.finder._PERIOD_S", 1e9)
    first, next_one, client = scheduler("first"), scheduler("next"), front()
    await first.join()
    await client.start()
    await next_one.join()
    (connection,) = client.connections
    connection.cut()
    await until(lambda: client.is_connected("next"))
    assert not client.is_connected("first")
    monkeypatch.setattr("app.fleet.finder._PERIOD_S", 0.0)
    client._finder.refresh()
    await until(lambda: client.is_connected("first"))


@pytest.mark.parametrize("serves", ["", "another model"])
async def test_only_an_entry_that_is_no_longer_repeated_is_dropped(
    registry: Registry, scheduler: Make, front: Make, monkeypatch: pytest.MonkeyPatch, serves: str
) -> None:
    """One front that cannot reach an engine, as in a partition, takes it from no other."""
    monkeypatch.setattr("app.fleet.finder._FORGET_AFTER_S", 0.0)
    engine, client = scheduler("engine", serves), front()
    await engine.member.join(engine.fronts, None)  # it does not listen

    async def look() -> list[str]:
        await client._finder._refresh(client)
        await client._finder.refreshed()
        return await registry.ids()

    client._finder._refreshed.set()
    for _ in range(3):
        assert await look() == ["engine"]
        await engine.member.confirm()
    assert await look() == ["engine"]  # the last repeat is new to it
    assert await look() == []


async def test_an_entry_of_an_older_version_stays(
    registry: Registry, front: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine does not repeat it."""
    monkeypatch.setattr("app.fleet.finder._FORGET_AFTER_S", 0.0)
    client = front()
    await registry.put(EngineEntry("older", "node", new_local_address(), None, b"", 1))
    client._finder._refreshed.set()
    for _ in range(3):
        await client._finder._refresh(client)
        await client._finder.refreshed()
    assert await registry.ids() == ["older"]


@pytest.mark.parametrize("fails", [True, False])
async def test_no_entry_is_dropped_for_an_outage_of_the_store(
    store: Store,
    registry: Registry,
    scheduler: Make,
    front: Make,
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
) -> None:
    """No engine could repeat it. A store that is away fails, or answers late."""
    monkeypatch.setattr("app.fleet.finder._FORGET_AFTER_S", 0.0)
    monkeypatch.setattr("app.fleet.finder._PERIOD_S", 1e9)
    engine, client = scheduler("engine"), front()
    await engine.member.join(engine.fronts, None)  # it does not listen
    await client.start()
    finder = client._finder
    assert "engine" in finder._repeats
    if fails:
        with monkeypatch.context() as away:
            away.setattr(store, "_internal_kv_list", None)
            finder.refresh()
            await until(lambda: not finder._repeats)
    else:
        monkeypatch.setattr("app.fleet.finder._LOOKED_WITHIN_S", 0.0)
    finder._refreshed.clear()
    finder.refresh()
    await finder.refreshed()
    assert "engine" in finder._repeats
    assert await registry.ids() == ["engine"]


async def test_an_entry_that_cannot_be_read_is_told_of_once(
    store: Store, registry: Registry, front: Make, caplog: pytest.LogCaptureFixture
) -> None:
    store._internal_kv_put(registry._key("odd"), b"no entry")
    client = front()
    await client.start()
    client._finder._refreshed.clear()
    client._finder.refresh()
    await client._finder.refreshed()
    assert caplog.text.count("Traceback") == 1


@pytest.mark.parametrize("num_turns", range(6))
async def test_an_engine_that_answers_as_the_limit_passes_is_connected_or_tried_again(
    registry: Registry, front: Make, monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    """As for a front that stood still: its welcome and first snapshot come turns of the loop
    before or after the limit passes. No front knows an engine that it has no connection to."""
    monkeypatch.setattr("app.fleet.connection._CONNECT_WITHIN_S", 0.0)
    answers = Welcome(1, 0.0, 11, (2,), 100), snapshot("engine")
    socket, loop = SimpleNamespace(send=id, close=tuple), asyncio.get_running_loop()

    async def connect(address: str, on_frame: Callable[[bytes], None], *_: Any) -> Any:
        def turn(number: int) -> None:
            if number < num_turns:
                loop.call_soon(turn, number + 1)
            else:
                for answer in answers:
                    on_frame(pack_kind(answer))

        loop.call_soon(turn, 0)
        return socket

    monkeypatch.setattr("app.fleet.connection.connect", connect)
    client = front()
    await registry.put(EngineEntry("engine", "node", "@", None, b"", 1))
    await client._finder._connect("engine", client)
    assert client.is_connected("engine") == bool(client.connections) == client.is_ready()


class NoEngines:
    """A registry in which no engine is, and the number of times that it was read."""

    num_reads = 0

    async def ids(self) -> list[str]:
        self.num_reads += 1
        return []


@pytest.mark.parametrize("num_turns", range(5))
async def test_its_end_is_not_lost_as_it_is_woken(num_turns: int) -> None:
    """An engine that ends with its fleet wakes the search, turns of the loop before its end."""
    registry: Any = NoEngines()
    finder = Finder(registry, "node")
    owner: Any = SimpleNamespace()
    finder.start(owner)
    await finder.refreshed()
    await asyncio.sleep(0)
    finder.refresh()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await finder.close()
    num_reads = registry.num_reads
    finder.refresh()
    for _ in range(5):
        await asyncio.sleep(0)
    assert registry.num_reads == num_reads
