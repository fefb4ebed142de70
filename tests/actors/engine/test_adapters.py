"""The adapter slots of a running engine: what they hold, and who may fill one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine import adapters
from actors.engine.adapters import AdapterSlots
from actors.scheduling.events import Refuse, Submit
from actors.scheduling.request import Grammar, Request, SamplingParams
from actors.transport.messages import Answer, Ask, Readiness
from tests.actors.engine.paper_engine import Engine, background
from tests.actors.executor.paper_ranks import until
from tests.actors.scheduling.short_lives import request

FRONT = 1  # a connection
Held = tuple[tuple[int, str], ...]


def with_grammar(number: int, adapter: int) -> Request:
    sampling = {"grammar": Grammar("regex", "a+")}
    return request(number, sampling=sampling, adapter=adapter)


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
            core, lambda event: core.handle(event, 50.0) and None, stages, publication, {}
        )  # fmt: skip

    async def _load(self, slot: int, folder: str) -> str | None:
        assert self.engine.core.view.num_adapter_loads == 1
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
    assert one.engine.core.view.num_adapter_loads == 0


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
    one.engine.loop._handle(Submit(Request(7, (1, 2, 3), SamplingParams(100), 50.0, adapter=1)))
    assert "still used by 1 requests" in str(await one.slots.load(0, "other"))
    assert one.loads == one.published == []
    assert await one.slots.load(1, "other") is None
    waiting = asyncio.create_task(one.slots.load(0, "other"))
    await asyncio.sleep(0)
    one.engine.stages.answer_all()
    assert await waiting is None
    assert not core.live_requests


@pytest.mark.parametrize("lookahead", [False, True])
async def test_requests_of_a_lost_adapter_end_alone(lookahead: bool) -> None:
    """They are refused: a step with one would fail, and rebuilds do not bring the adapter back."""
    engine = Engine(lookahead=lookahead)
    for slot in (0, 1):
        engine.wires.receive(FRONT, Ask(slot, "load_adapter", (slot, f"folder {slot}")))
    await background()
    kept = [request(1, output=6), request(2, output=6, adapter=1)]
    engine.submit(*kept, request(3, output=6, adapter=2))
    engine.stages.answer()
    engine.stages.lost_adapters = {1}
    engine.stages.lose("a stage died")
    await background()
    started = [start for plan in engine.stages.unanswered for start in plan.started]
    assert 3 not in [start.request_id for start in started]
    engine.submit(request(4, adapter=2), with_grammar(5, adapter=2))
    await background()
    refusals = [(r.request_id, r.param, r.retry_after_s) for r in engine.told(Refuse)]
    assert refusals == [(number, "model", None) for number in (3, 4, 5)]
    assert all("no adapter is loaded in slot 1" in r.message for r in engine.told(Refuse))
    engine.stages.answer_all()
    engine.check_complete(*kept)
    engine.check_empty()
    assert [message.is_ready for message in engine.told(Readiness)] == [False, True]
    engine.wires.receive(FRONT, Ask(2, "load_adapter", (1, "folder 1")))
    await background()
    engine.submit(again := request(6, adapter=2))
    engine.stages.answer_all()
    engine.check_complete(again)


async def test_a_request_that_waits_for_its_grammar_uses_its_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the slot would be filled under it, and its tokens be those of another adapter."""
    monkeypatch.setattr(adapters, "_FREE_WITHIN_S", 0.1)
    engine = Engine()
    engine.wires.receive(FRONT, Ask(1, "load_adapter", (0, "folder")))
    await background()
    engine.stages.may_go_on.clear()
    engine.submit(one := with_grammar(1, adapter=1))
    engine.wires.receive(FRONT, Ask(2, "load_adapter", (0, "other")))
    engine.wires.receive(FRONT, Ask(3, "load_adapter", (1, "other")))
    engine.submit(request(2, adapter=2), with_grammar(3, adapter=2))  # their slot is being loaded
    await until(lambda: engine.told(Answer)[1:])
    assert engine.told(Answer)[1] == Answer(2, "adapter slot 0 is still used by 1 requests")
    assert [refusal.request_id for refusal in engine.told(Refuse)] == [2, 3]
    engine.stages.may_go_on.set()
    await background()
    assert engine.stages.adapters == {0: "folder", 1: "other"}
    engine.stages.answer_all()
    engine.check_complete(one)
