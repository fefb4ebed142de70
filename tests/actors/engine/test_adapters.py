"""The adapter slots of a running engine: what they hold, and who may fill one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine import adapters
from actors.engine.adapters import AdapterSlots
from actors.scheduling.events import Submit
from actors.scheduling.request import Request, SamplingParams
from tests.actors.engine.paper_engine import Engine

Held = tuple[tuple[int, str], ...]


class Slots:
    """Two slots of a paper engine, the first of which holds an adapter of the settings."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.published: list[Held] = []
        self.loads: list[tuple[int, str]] = []
        self.problem: str | None = None
        stages: Any = SimpleNamespace(load_adapter=self._load, adapters={0: "first"})
        publication: Any = SimpleNamespace(holds_adapters=self.published.append)
        core = self.engine.core
        self.slots = AdapterSlots(
            core, lambda event: core.handle(event, 50.0) and None, stages, publication
        )  # fmt: skip

    async def _load(self, slot: int, folder: str) -> str | None:
        assert self.engine.core.view.num_loads == 1
        self.loads.append((slot, folder))
        await asyncio.sleep(0)
        return self.problem


async def test_fronts_see_what_the_slots_hold() -> None:
    one = Slots()
    assert await one.slots.load(1, "second") is None
    assert one.published == [((0, "first"),), ((0, "first"), (1, "second"))]
    one.problem = "no such folder"
    assert await one.slots.load(0, "lost", "key") == "no such folder"
    assert one.published[-1] == ((1, "second"),)
    assert one.engine.core.view.num_loads == 0


async def test_several_fronts_may_ask_for_one_adapter() -> None:
    one = Slots()
    asked = [one.slots.load(1, "folder", key) for key in ("k1", "k1", "k2", "k2")]
    assert await asyncio.gather(*asked) == [None] * 4
    assert one.loads == [(1, "folder")] * 2
    assert await one.slots.load(1, "folder") is None  # which may have other content by now
    assert one.loads == [(1, "folder")] * 3


async def test_a_slot_is_not_filled_while_a_request_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapters, "_FREE_WITHIN_S", 0.1)
    one, core = Slots(), None
    core = one.engine.core
    request = Request(7, (1, 2, 3), SamplingParams(100), 50.0, adapter=1)
    one.engine.loop._handle(Submit(request))
    assert "still used by 1 requests" in str(await one.slots.load(0, "other"))
    assert one.loads == one.published == []
    assert await one.slots.load(1, "other") is None
    waiting = asyncio.create_task(one.slots.load(0, "other"))
    await asyncio.sleep(0)
    one.engine.stages.answer_all()
    assert await waiting is None
    assert not core.live_requests
