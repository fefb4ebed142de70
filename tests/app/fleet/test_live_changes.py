"""What an engine that joins a fleet later gets of the changes made before."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from actors.scheduling.config import ConfigError, SchedulerConfig
from app.engine_client.client import EngineUnavailable, RequestRefused
from app.fleet.live_changes import LiveChanges, reset_prefix_caches


class Engine:
    """Judges and applies changes as an engine's core does; stands for the connection to it."""

    engine_id = "engine"

    def __init__(self) -> None:
        self.config = SchedulerConfig(num_blocks=64)
        self.answers = asyncio.Event()
        self.answers.set()
        self.has_changed = asyncio.Event()

    async def try_changes(self, changes: Mapping[str, Any]) -> None:
        self._changed(changes)

    async def reconfigure(self, changes: Mapping[str, Any]) -> None:
        self.config = self._changed(changes)
        self.has_changed.set()
        await self.answers.wait()

    def _changed(self, changes: Mapping[str, Any]) -> SchedulerConfig:
        try:
            return self.config.with_changes(changes)
        except ConfigError as error:
            raise RequestRefused(str(error), param=error.key) from error


async def test_an_engine_that_joins_has_the_settings_of_those_that_ran() -> None:
    changes, running, late = LiveChanges(), Engine(), Engine()
    engines: list[Any] = [running]
    for change in (
        {"token_budget": 256},
        {"budget": "adaptive", "slo.tbt_ms": 50},
        {"tbt_ms": 80},
    ):
        await changes.make(change, lambda: engines)
    with pytest.raises(RequestRefused):
        await changes.make({"token_budget": 256}, lambda: engines)
    joining: Any = late
    changes.catch_up(joining)
    async with asyncio.timeout(30):
        await late.has_changed.wait()
    assert late.config == running.config
    assert (late.config.budget, late.config.token_budget, late.config.tbt_s) == (
        "adaptive",
        None,
        0.08,
    )


async def test_an_engine_that_joins_during_a_change_gets_it_too() -> None:
    changes, running, late = LiveChanges(), Engine(), Engine()
    running.answers.clear()
    engines: list[Any] = [running]
    making = asyncio.create_task(changes.make({"policy": "vllm"}, lambda: [*engines]))
    async with asyncio.timeout(30):
        await running.has_changed.wait()
        engines.append(late)
        changes.catch_up(engines[1])
        running.answers.set()
        await making
        await late.has_changed.wait()
    assert late.config.policy == "vllm"


async def test_what_one_engine_refuses_none_of_them_makes() -> None:
    engines: list[Any] = [Engine(), Engine()]
    engines[1].config = replace(engines[1].config, max_step_tokens=128)
    before = [engine.config for engine in engines]
    changes = LiveChanges()
    with pytest.raises(RequestRefused, match="128"):
        await changes.make({"budget": "fixed", "token_budget": 256}, lambda: engines)
    assert [engine.config for engine in engines] == before
    await changes.make({"budget": "fixed", "token_budget": 64}, lambda: engines)
    assert [engine.config.token_budget for engine in engines] == [64, 64]


async def test_what_an_engine_refuses_is_told_though_another_does_not_answer() -> None:
    class Silent(Engine):
        async def try_changes(self, changes: Mapping[str, Any]) -> None:
            raise EngineUnavailable("the scheduler does not answer")

        reconfigure = try_changes

    engines: list[Any] = [Silent(), Engine()]
    with pytest.raises(RequestRefused):
        await LiveChanges().make({"max_requests": "many"}, lambda: engines)
    with pytest.raises(EngineUnavailable):
        await LiveChanges().make({"policy": "vllm"}, lambda: engines[:1])


class Cached:
    """An engine with a cache, or one that does not answer."""

    def __init__(self, answers: bool = True) -> None:
        self.is_full = True
        self.answers = answers

    async def reset_prefix_cache(self) -> None:
        if not self.answers:
            raise EngineUnavailable("the scheduler does not answer")
        self.is_full = False


async def test_a_reset_reaches_those_that_join_meanwhile() -> None:
    class Slow(Cached):
        async def reset_prefix_cache(self) -> None:
            engines.append(late)
            await super().reset_prefix_cache()

    late, engines = Cached(), list[Any]()
    engines += [Slow(), Cached()]
    await reset_prefix_caches(lambda: engines)
    assert not any(engine.is_full for engine in engines)


async def test_a_reset_that_an_engine_may_have_missed_is_told() -> None:
    """What has ended meanwhile has no cache."""
    engines: list[Any] = [Cached(), Cached(answers=False)]
    with pytest.raises(EngineUnavailable):
        await reset_prefix_caches(lambda: engines)
    seen = iter([engines, engines[:1], engines[:1]])
    await reset_prefix_caches(lambda: next(seen))
    with pytest.raises(EngineUnavailable, match="no engine"):
        await reset_prefix_caches(list)
