"""Adapters of a running engine: a slot each, held while requests run on it, loaded again later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from actors.executor import stage_set
from actors.scheduling.request import Request, SamplingParams
from app.engine_client.adapters import LOAD_WITHIN_S, AdapterEngine
from app.engine_client.client import (
    EngineClient,
    EngineUnavailable,
    GenerationRequest,
    RequestRefused,
)
from tests.app.engine_client.paper_scheduler import (
    Cluster,
    PaperStages,
    in_place_of_ray,
    settings,
    until,
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return in_place_of_ray(monkeypatch)


@pytest.fixture
async def engine(cluster: Cluster) -> AsyncIterator[AdapterEngine]:
    """Two slots, the first of which is filled."""
    config = settings(adapters=((0, "a-folder"),))
    config = replace(config, stage=replace(config.stage, max_adapters=2))
    made = AdapterEngine(config, "base", ("a",))
    await made.start()
    yield made
    await made.close()


async def read(engine: EngineClient, name: str = "r", **changes: Any) -> None:
    asked = GenerationRequest(name, (1, 2, 3), SamplingParams(4), **changes)
    async for _ in engine.generate(asked):
        pass


async def asked_of(cluster: Cluster, reading: asyncio.Task[None]) -> Request:
    """What the core has got; the request is then left to end."""
    await until(lambda: cluster.last.core.live_requests)
    ((_, state),) = cluster.last.core.live_requests.items()
    cluster.let_go()
    await reading
    found: Request = state.request
    return found


async def test_a_request_of_an_adapter_has_its_slot_and_shares_no_prefix(
    cluster: Cluster, engine: AdapterEngine
) -> None:
    await engine.load_adapter("b", "b-folder")
    assert cluster.last.stages.adapters == {0: "a-folder", 1: "b-folder"}
    salts = []
    for number, name in enumerate("aab"):
        cluster.num_steps = 0
        client = engine.adapters[name]
        reading = asyncio.create_task(read(client, f"r{number}", tenant="t"))
        request = await asked_of(cluster, reading)
        assert request.adapter == {"a": 1, "b": 2}[name]
        assert request.cache_salt.endswith("/t")
        salts.append(request.cache_salt)
    assert salts[0] == salts[1] != salts[2]
    cluster.num_steps = 0
    reading = asyncio.create_task(read(engine.adapters["a"], cache_salt=""))
    assert (await asked_of(cluster, reading)).cache_salt == salts[0].removesuffix("t")
    card = engine.adapters["b"].card
    assert (card.name, card.parent, card.path) == ("b", "base", engine.card.path)


async def test_names_are_served_once(cluster: Cluster, engine: AdapterEngine) -> None:
    for name in ("a", "base"):
        with pytest.raises(RequestRefused, match="served already") as caught:
            await engine.load_adapter(name, "folder")
        assert caught.value.param == "lora_name"
    loading = asyncio.create_task(engine.load_adapter("b", "b-folder"))
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused, match="served already"):
        await engine.load_adapter("b", "another")
    with pytest.raises(RequestRefused, match="all 2 adapter slots"):
        await engine.load_adapter("c", "c-folder")  # its slot is being filled
    await loading
    assert list(engine.adapters) == ["a", "b"]


async def test_an_adapter_that_cannot_be_loaded_leaves_its_slot(
    cluster: Cluster, engine: AdapterEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = ["rank too high", KeyError(7)]

    async def load(slot: int, folder: str) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(cluster.last.stages, "load_adapter", load)
    with pytest.raises(RequestRefused, match="rank too high") as caught:
        await engine.load_adapter("b", "b-folder")
    assert caught.value.param == "lora_path"
    with pytest.raises(EngineUnavailable, match="KeyError"):
        await engine.load_adapter("b", "b-folder")
    answers.append(None)
    await engine.load_adapter("c", "c-folder")
    assert list(engine.adapters) == ["a", "c"]


async def test_an_unloaded_adapter_holds_its_slot_while_requests_run_on_it(
    cluster: Cluster, engine: AdapterEngine
) -> None:
    await engine.load_adapter("b", "b-folder")
    cluster.num_steps = 1
    held = engine.adapters["a"]
    reading = asyncio.create_task(read(held))
    await until(lambda: engine.num_open)
    assert await engine.unload_adapter("a") == 1
    assert "a" not in engine.adapters
    with pytest.raises(RequestRefused, match="has been unloaded"):
        await read(held, "s")
    with pytest.raises(RequestRefused, match="slots are taken"):
        await engine.load_adapter("c", "c-folder")
    with pytest.raises(RequestRefused, match="no adapter 'a'"):
        await engine.unload_adapter("a")
    cluster.let_go()
    await reading
    await engine.load_adapter("a", "new-folder")
    assert cluster.last.stages.adapters == {1: "b-folder", 0: "new-folder"}
    assert engine.adapters["a"] is not held
    assert await engine.unload_adapter("a") == 0


async def test_a_load_waits_for_a_rebuild(cluster: Cluster, engine: AdapterEngine) -> None:
    cluster.last.die()
    await until(lambda: not engine.is_ready())
    await engine.load_adapter("b", "b-folder")
    assert len(cluster.schedulers) == 2
    assert cluster.last.stages.adapters == {0: "a-folder", 1: "b-folder"}
    await read(engine.adapters["b"])


async def test_a_load_fails_with_the_rebuild_that_it_waits_for(
    cluster: Cluster, engine: AdapterEngine
) -> None:
    cluster.start_errors = [OSError(28, "No space left on device")] * 3
    cluster.last.die()
    await until(lambda: not engine.is_ready())
    loading = asyncio.create_task(engine.load_adapter("b", "b-folder"))
    await asyncio.sleep(0)
    assert await engine.unload_adapter("a") == 0  # which asks no scheduler
    with pytest.raises(EngineUnavailable, match="could not be rebuilt"):
        await loading
    assert not engine.adapters


@pytest.mark.parametrize("num_deaths", [1, 2])
async def test_a_load_during_which_the_scheduler_ends_is_repeated_once(
    cluster: Cluster, engine: AdapterEngine, monkeypatch: pytest.MonkeyPatch, num_deaths: int
) -> None:
    load = PaperStages.load_adapter

    async def die_or_load(stages: PaperStages, slot: int, folder: str) -> str | None:
        if len(cluster.schedulers) <= num_deaths:
            cluster.last.die()
        return await load(stages, slot, folder)

    monkeypatch.setattr(PaperStages, "load_adapter", die_or_load)
    if num_deaths == 1:
        await engine.load_adapter("b", "b-folder")
        await read(engine.adapters["b"])
        return
    with pytest.raises(EngineUnavailable, match="has ended"):
        await engine.load_adapter("b", "b-folder")
    await until(engine.is_ready)
    await engine.load_adapter("b", "b-folder")  # its slot was free again


async def test_the_next_scheduler_loads_what_was_loaded_live(
    cluster: Cluster, engine: AdapterEngine
) -> None:
    await engine.load_adapter("b", "b-folder")
    await engine.unload_adapter("a")
    await engine.load_adapter("c", "c-folder")
    cluster.last.die()
    await until(lambda: len(cluster.schedulers) == 2 and engine.is_ready())
    assert cluster.last.config.adapters == ((1, "b-folder"), (0, "c-folder"))
    await read(engine.adapters["c"])


def test_a_client_waits_until_it_is_told_that_its_load_hangs() -> None:
    """Also behind one that hangs, and with time for a load behind two."""
    assert 2 * stage_set._ADAPTER_LIMIT_S + 60.0 <= LOAD_WITHIN_S
