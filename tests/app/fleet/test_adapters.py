"""The list of a fleet's adapters: one for all fronts, whoever changes it and when."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from app.engine_client.channel import QuestionFailed
from app.engine_client.client import EngineUnavailable, RequestRefused
from app.fleet import adapters as module
from app.fleet.adapters import FleetAdapters
from app.fleet.registry import AdapterEntry, AdapterList, Registry
from tests.app.fleet.live.waiting import until


class Store:
    """The cluster's key-value store, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def _internal_kv_put(
        self, key: str, value: bytes, overwrite: bool = True, namespace: str = ""
    ) -> bool:
        is_there = key in self.values
        if overwrite or not is_there:
            self.values[key] = value
        return is_there

    def _internal_kv_get(self, key: str | bytes, namespace: str) -> bytes | None:
        return self.values.get(key.decode() if isinstance(key, bytes) else key)

    def _internal_kv_del(self, key: str, namespace: str) -> None:
        self.values.pop(key, None)

    def _internal_kv_list(self, prefix: str, namespace: str) -> list[bytes]:
        return [key.encode() for key in self.values if key.startswith(prefix)]


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr("app.fleet.registry.internal_kv", made)
    return made


@dataclass
class Connection:
    """An engine that does as it is told; `answers`: what it says instead, first one first."""

    engine_id: str = "e"
    is_open: bool = True
    answers: list[Any] = field(default_factory=list)
    snapshot: Any = field(default_factory=lambda: SimpleNamespace(accepts=True, adapters=()))
    asked: list[tuple[int, str]] = field(default_factory=list)

    async def ask(
        self, question: str, slot: int, folder: str, key: str, within_s: float
    ) -> str | None:
        await asyncio.sleep(0)
        self.asked.append((slot, folder))
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            held = [entry for entry in self.snapshot.adapters if entry[0] != slot]
            self.snapshot.adapters = (*held, (slot, key))
        return answer


def front(
    *connections: Connection,
    slots: int = 2,
    name: str = "base",
    models: Mapping[str, object] = MappingProxyType({"base": None}),
    **paths: str,
) -> FleetAdapters:
    fleet: Any = SimpleNamespace(
        name=name, adapters={}, connections=list(connections),
        snapshots=[connection.snapshot for connection in connections],
    )  # fmt: skip
    return FleetAdapters(fleet, Registry(f"app/{name}"), slots, paths, models)


async def test_a_list_replaces_only_the_one_before_it(store: Store) -> None:
    registry = Registry("x")
    lists = [AdapterList(n, (AdapterEntry(0, f"n{n}", "f", "k"),)) for n in range(1, 4)]
    assert await registry.adapters("s") == AdapterList()
    for one in lists:
        assert await registry.put_adapters("s", one)
        assert not await registry.put_adapters("s", one)
        assert await registry.adapters("s") == one
        assert len(store.values) == 1
    assert not await registry.put_adapters("s", lists[0])  # it has been, and is gone
    assert await registry.adapters("s") == lists[2]
    assert await registry.adapters("other settings") == AdapterList()


async def test_of_two_changes_at_a_time_none_is_lost() -> None:
    engine = Connection()
    fronts = [front(engine, slots=4) for _ in range(3)]
    loads = [one.load_adapter(f"a{n}", f"f{n}") for n, one in enumerate(fronts)]
    done = await asyncio.gather(*loads, return_exceptions=True)
    for one in fronts:
        await one._refresh()
    listed = [name for name, result in zip(("a0", "a1", "a2"), done, strict=True) if not result]
    assert listed
    assert all("try again" in str(result) for result in done if result)
    assert all(set(one.adapters) == set(listed) for one in fronts)
    assert await fronts[0].unload_adapter(listed[0]) == 0
    await asyncio.gather(*[one.load_adapter("again", "f") for one in fronts[:1]])
    slots = [entry.slot for entry in fronts[0]._entries.values()]
    assert len(slots) == len(set(slots))


async def test_an_engine_that_refuses_refuses_for_all() -> None:
    engines = [Connection(), Connection(answers=["rank too high"])]
    one = front(*engines)
    with pytest.raises(RequestRefused, match="rank too high"):
        await one.load_adapter("a", "f")
    assert not one.adapters
    engines[0].answers = [EngineUnavailable("gone")]
    await one.load_adapter("a", "f")  # on the other
    assert list(one.adapters) == ["a"]
    for engine in engines:
        engine.answers = [QuestionFailed("KeyError"), EngineUnavailable("gone")]
    with pytest.raises(EngineUnavailable):
        await one.load_adapter("b", "f")
    assert list(one.adapters) == ["a"]


async def test_engines_that_lack_one_are_asked_until_they_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PERIOD_S", 0.0)
    monkeypatch.setattr(module, "_AGAIN_AFTER_S", 0.0)
    leaving = Connection("leaving")
    leaving.snapshot.accepts = False
    engine = Connection(answers=["no such folder", EngineUnavailable("not yet")])
    one = front(engine, leaving, zero="zero-folder")
    one.start()
    await until(lambda: engine.snapshot.adapters)
    assert engine.snapshot.adapters == ((0, "zero-folder"),)
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.asked == [(0, "zero-folder")] * 3
    assert not leaving.asked
    one.close()


async def test_a_slot_that_nothing_holds_comes_first() -> None:
    engine = Connection()
    one = front(engine, slots=3)
    for name in ("a", "b"):
        await one.load_adapter(name, name)
    await one.unload_adapter("a")  # requests may run on it
    await one.load_adapter("c", "c")
    await one.load_adapter("d", "d")
    assert engine.asked == [(0, "a"), (1, "b"), (2, "c"), (0, "d")]
    with pytest.raises(RequestRefused, match="all 3 adapter slots"):
        await one.load_adapter("e", "e")


def two_models(**engines: Connection) -> list[FleetAdapters]:
    """Those of a front for a model of each of these names."""
    models = dict.fromkeys(engines)
    controls = [front(engine, name=name, models=models) for name, engine in engines.items()]
    for one in controls:
        one.beside = [other for other in controls if other is not one]
    return controls


async def test_no_two_models_have_adapters_of_one_name() -> None:
    engines = {"a": Connection("a"), "b": Connection("b")}
    of_a, of_b = two_models(**engines)
    another_of_a, another_of_b = two_models(**engines)
    await of_a.load_adapter("x", "f")
    for control in (of_b, another_of_b, another_of_a):  # others have not yet read the list
        for name in ("x", "a", "b"):
            with pytest.raises(RequestRefused, match=f"'{name}' is served already") as caught:
                await control.load_adapter(name, "f")
            assert caught.value.param == "lora_name"
    await of_b.load_adapter("y", "f")
    assert [engine.asked for engine in engines.values()] == [[(0, "f")], [(0, "f")]]
    assert await another_of_b.unload_adapter("y") == 0
    await another_of_a.load_adapter("y", "f")  # the name is free again, also for the other model


async def test_of_two_models_that_take_a_name_at_a_time_one_has_it_at_most() -> None:
    engines = {"a": Connection("a"), "b": Connection("b")}
    (of_a, _), (_, of_b) = two_models(**engines), two_models(**engines)
    loads = [one.load_adapter("x", "f") for one in (of_a, of_b)]
    done = await asyncio.gather(*loads, return_exceptions=True)
    await asyncio.gather(*[one._refresh() for one in (of_a, of_b)])
    served = [one for one in (of_a, of_b) if "x" in one.adapters]
    assert len(served) == done.count(None) <= 1
    assert all("served already" in str(result) for result in done if result)


async def test_a_name_is_loaded_once_at_a_time() -> None:
    one = front(Connection(), slots=2)
    done = await asyncio.gather(
        one.load_adapter("x", "f"), one.load_adapter("x", "g"), return_exceptions=True
    )
    assert [str(result) for result in done if result] == ["a model 'x' is served already"]
    assert list(one.adapters) == ["x"]


async def test_the_list_is_that_of_all_settings_at_the_address() -> None:
    """Else a model, or another model's adapter, could be named as one that was loaded before."""
    engine = Connection()
    for models in ({"base": None}, {"base": None, "x": None}, {"base": "other adapters"}):
        one = front(engine, models=models)
        await one._refresh()
        assert not one.adapters
        await one.load_adapter(f"a{len(models)}", "f")
