"""Adapters loaded live into a fleet: on every engine, for every front, and for those that join."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from actors.fleet.routers import build_router
from actors.scheduling.request import SamplingParams
from actors.transport.node_directory import this_node
from app.engine_client.client import EngineUnavailable, GenerationRequest, RequestRefused
from app.fleet.adapters import FleetAdapters
from app.fleet.client import FleetClient
from app.fleet.finder import Finder
from tests import tiny_adapters
from tests.actors.stage.greedy_reference import GREEDY, expected, make_prompts
from tests.app.fleet.live.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
SLOTS = {"max_adapters": 2, "max_rank": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [tiny_adapters.write(root / str(n), seed=n, r=4 + n) for n in range(3)]


@pytest.fixture
async def front_of() -> AsyncIterator[Callable[..., Any]]:
    """Adapters of a fleet's front, or of another one."""
    made: list[Any] = []

    async def make(fleet: Any, paths: dict[str, str], other: bool = False) -> FleetAdapters:
        client = fleet.front
        if other:
            router, finder = build_router("round_robin"), Finder(fleet.registry, this_node())
            client = FleetClient(finder, "tiny", str(fleet.folder), router, rebalance=False)
            await client.start()
        adapters = FleetAdapters(
            client, fleet.registry, SLOTS["max_adapters"], paths, {"tiny": None}
        )
        adapters.start()
        made.append((adapters, client))
        return adapters

    yield make
    for adapters, client in made:
        adapters.close()
        await client.close()


async def said(adapters: FleetAdapters, name: str, times: int = 1) -> list[list[int]]:
    """What all prompts are answered, each `times` at once and so by several engines."""

    async def one(number: int, prompt: list[int], copy: int) -> list[int]:
        asked = GenerationRequest(f"{number}-{copy}", tuple(prompt), GREEDY)
        return [t async for c in adapters.adapters[name].generate(asked) for t in c.tokens]

    numbered = list(enumerate(make_prompts()))
    found = await asyncio.gather(*[one(n, p, c) for c in range(times) for n, p in numbered])
    answers = [
        found[start : start + len(numbered)] for start in range(0, len(found), len(numbered))
    ]
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


async def test_loaded_and_unloaded_on_every_engine(
    make_fleet: Any, front_of: Any, folders: list[Path], tmp_path: Path
) -> None:
    paths = {"zero": str(folders[0])}
    fleet = await make_fleet(2, adapters={**SLOTS, "paths": paths})
    one, other = await front_of(fleet, paths), await front_of(fleet, paths, other=True)
    wanted = [tiny_adapters.expected(folder) for folder in folders]
    assert wanted[0] != wanted[1] != expected("llama")

    for bad, words in ((tmp_path / "nowhere", "is missing"), (tmp_path, "adapter_config.json")):
        with pytest.raises(RequestRefused, match=words) as caught:
            await one.load_adapter("one", str(bad))
        assert caught.value.param == "lora_path"
    await one.load_adapter("one", str(folders[1]))
    assert await said(one, "one", times=2) == wanted[1]
    assert await said(one, "zero", times=2) == wanted[0]
    await until(lambda: "one" in other.adapters)
    assert await said(other, "one", times=2) == wanted[1]

    for front in (one, other):
        for name in ("one", "zero", "tiny"):
            with pytest.raises(RequestRefused, match="is served already"):
                await front.load_adapter(name, str(folders[2]))
        with pytest.raises(RequestRefused, match="all 2 adapter slots are taken"):
            await front.load_adapter("two", str(folders[2]))

    held = other.adapters["zero"]
    assert await one.unload_adapter("zero") == 0  # one of the settings
    with pytest.raises(RequestRefused, match="no adapter 'zero'"):
        await other.unload_adapter("zero")
    assert set(other.adapters) == {"one"}
    with pytest.raises(RequestRefused, match="has been unloaded"):
        async for _ in held.generate(GenerationRequest("r", (1,), SamplingParams(1))):
            pass
    await other.load_adapter("two", str(folders[2]))
    assert await said(other, "two", times=2) == wanted[2]
    await until(lambda: "two" in one.adapters)
    assert await said(one, "two", times=2) == wanted[2]

    # The same name and folder, with other content.
    assert await one.unload_adapter("two") == 0
    shutil.copytree(folders[0], tmp_path / "two")
    await one.load_adapter("two", str(tmp_path / "two"))
    await one.unload_adapter("two")
    shutil.rmtree(tmp_path / "two")
    shutil.copytree(folders[2], tmp_path / "two")
    await one.load_adapter("two", str(tmp_path / "two"))
    assert await said(one, "two", times=2) == wanted[2]


async def test_an_engine_that_joins_gets_the_list(
    make_fleet: Any, front_of: Any, folders: list[Path]
) -> None:
    """Later ones, and the successor of one that died, beside a front that has just started."""
    paths = {"zero": str(folders[0])}
    fleet = await make_fleet(1, adapters={**SLOTS, "paths": paths})
    one = await front_of(fleet, paths)
    await one.unload_adapter("zero")
    await one.load_adapter("one", str(folders[1]))
    await one.load_adapter("two", str(folders[2]))
    late = await front_of(fleet, paths, other=True)
    await until(lambda: set(late.adapters) == {"one", "two"})

    await fleet.add()
    assert await said(one, "two", times=2) == tiny_adapters.expected(folders[2])
    listed = [entry[0] for entry in fleet.front.snapshots[0].adapters]
    assert listed == [0, 1]
    await until(lambda: len({s.adapters for s in fleet.front.snapshots}) == 1)
    os.kill(await fleet.pid(0), signal.SIGKILL)
    answers = [said(front, "one", times=2) for front in (one, late)]
    assert await asyncio.gather(*answers) == [tiny_adapters.expected(folders[1])] * 2
    await until(lambda: len(fleet.front.snapshots) == 2)
    await until(lambda: len({s.adapters for s in fleet.front.snapshots}) == 1)


async def test_without_an_engine_nothing_is_loaded(
    make_fleet: Any, front_of: Any, folders: list[Path]
) -> None:
    fleet = await make_fleet(0)
    one = await front_of(fleet, {})
    with pytest.raises(EngineUnavailable, match="there is no engine"):
        await one.load_adapter("one", str(folders[1]))
    assert not one.adapters
