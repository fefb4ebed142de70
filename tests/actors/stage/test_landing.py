"""Waits for a device, and the steps that need them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.scheduling.plan import RequestStart, Slice, StepPlan
from actors.scheduling.request import SamplingParams
from actors.stage import head
from actors.stage.landing import await_queue
from tests.actors.stage.mini_planner import make_runner


def test_waiting_for_a_device_sleeps_until_its_queue_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    await_queue(torch.device("cpu"))
    assert not calls
    await_queue(torch.device("cuda"))
    assert calls == ["record", "synchronize"]


def test_an_answer_without_tokens_waits_for_the_device(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else of such a step does: its KV would be saved, and its time taken, too early."""
    waits: list[torch.device] = []
    monkeypatch.setattr(head, "await_queue", waits.append)
    runner = make_runner(tiny_model("llama"))
    prompt = tuple(range(21))
    started = RequestStart(1, prompt, len(prompt), tuple(range(8)), SamplingParams(max_tokens=4))
    runner.execute(StepPlan(0, (Slice(1, 0, 16, False),), started=(started,)), None)
    assert waits == [torch.device("cpu")]
    runner.execute(StepPlan(1, (Slice(1, 16, 5, True),)), None)
    assert len(waits) == 1
