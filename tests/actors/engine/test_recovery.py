"""A rebuild that raises is counted, whatever it raises; steps that fail one by one are not."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import actors.engine.recovery as module
from actors.engine.recovery import Recovery, suspects_of, suspects_of_loss
from actors.scheduling.events import PipelineLost
from actors.scheduling.request import FinishReason, Grammar
from actors.transport.background_tasks import BackgroundTasks
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.short_lives import config, request

GRAMMAR = Grammar("regex", "a+")


class Stages:
    """Building them fails so often. prepared: the grammars of each time that succeeded."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.prepared: list[set[Grammar]] = []

    async def prepare(self, grammars: set[Grammar]) -> None:
        self.prepared.append(grammars)

    async def rebuild(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(28, "No space left on device")


class GivenUp(BaseException):
    pass


def _recovery(num_failures: int) -> tuple[Recovery, list[object], asyncio.Event]:
    told: list[object] = []
    rebuilt = asyncio.Event()
    stages: Any = Stages(num_failures)

    def on_rebuilt() -> None:
        told.append(stages.prepared)
        rebuilt.set()

    recovery = Recovery(
        stages, 3, BackgroundTasks(), lambda: told.append("lost"), lambda: told.append("built"),
        lambda: {GRAMMAR}, on_rebuilt, num_requests=lambda: 5, engine_id="a7",
    )  # fmt: skip
    return recovery, told, rebuilt


async def test_a_full_disk_for_a_while_costs_two_rebuilds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recovery, told, rebuilt = _recovery(2)
    recovery.lose("a stage died")
    recovery.lose("another too")
    assert recovery.is_rebuilding
    await rebuilt.wait()
    assert (recovery.is_rebuilding, recovery.num_recoveries, told) == (
        *(False, 1),
        ["lost", "built", [{GRAMMAR}]],
    )
    lines = [record.getMessage() for record in caplog.records if record.name == "legato.notices"]
    full = "OSError: [Errno 28] No space left on device"
    assert lines[:3] == [
        f"engine a7: stages lost ({reason}): rebuilding them, "
        f"requests waiting: 5 (rebuild {n} of 3)"
        for n, reason in ((1, "a stage died"), (2, full), (3, full))
    ]
    assert re.fullmatch(r"engine a7: stages rebuilt in 0\.\d s, requests going on: 5", lines[3])


async def test_a_rank_that_fails_with_a_traceback_is_told_of_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recovery, _, rebuilt = _recovery(0)
    recovery.lose("a rank failed: ValueError: 7\nTraceback (most recent call last):\n  here")
    await rebuilt.wait()
    told, whole = [
        [record.getMessage() for record in caplog.records if record.name == name]
        for name in ("legato.notices", "legato.recovery")
    ]
    assert "stages lost (a rank failed: ValueError: 7): rebuilding them" in told[0]
    assert "Traceback" not in told[0]
    assert whole[0].endswith("\n  here")


async def test_a_full_disk_for_good_ends_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = asyncio.Event()

    def leave(status: int) -> None:
        gone.set()
        raise GivenUp

    monkeypatch.setattr("os._exit", leave)
    recovery, _, rebuilt = _recovery(10)
    with pytest.raises(GivenUp):
        await recovery._rebuild("a stage died")
    assert gone.is_set()
    assert not rebuilt.is_set()
    assert "giving up on the stages: OSError: [Errno 28] No space left on device; 3 " in caplog.text


async def test_a_recovery_that_cannot_even_say_so_ends_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alive, it would keep every request waiting for stages that nobody builds."""
    gone: list[int] = []

    def say_nothing(*said: object) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "notify", say_nothing)
    monkeypatch.setattr("os._exit", gone.append)
    recovery, _, _ = _recovery(0)
    with pytest.raises(MemoryError):
        await recovery._rebuild("a stage died")
    assert gone == [1]


async def test_stages_that_die_while_a_grammar_hangs_are_rebuilt_at_once() -> None:
    recovery, told, rebuilt = _recovery(0)
    stages: Any = recovery._stages
    hangs, prepare = asyncio.Event(), stages.prepare

    async def hang(grammars: set[Grammar]) -> None:
        stages.prepare = prepare
        hangs.set()
        await asyncio.Event().wait()

    stages.prepare = hang
    recovery.lose("a stage died")
    await hangs.wait()
    recovery.pipeline_lost("another died")
    await rebuilt.wait()
    assert told == ["lost", "built", "built", [{GRAMMAR}]]


async def test_steps_that_fail_in_a_row_or_for_good_cost_the_stages() -> None:
    recovery, _, rebuilt = _recovery(0)
    for num_in_a_row in (1, 2, 3):
        recovery.step_failed("IndexError: 7", num_in_a_row)
    assert not recovery.is_rebuilding
    recovery.step_failed("IndexError: 7", 4)
    assert recovery.is_rebuilding
    assert not recovery.steps_are_suspect, "those in flight have not lost the stages"
    await rebuilt.wait()
    rebuilt.clear()
    recovery.lose("a stage died")
    assert recovery.steps_are_suspect
    await rebuilt.wait()
    recovery.step_failed("AcceleratorError: CUDA error: device-side assert triggered", 1)
    assert recovery.is_rebuilding


async def test_requests_in_a_row_that_overflow_cost_the_stages() -> None:
    recovery, _, rebuilt = _recovery(0)
    recovery.overflowed(3)
    assert not recovery.is_rebuilding
    recovery.overflowed(5)
    assert recovery.is_rebuilding
    await rebuilt.wait()
    for num_in_a_row in (5, 9):  # it did not help
        recovery.overflowed(num_in_a_row)
        assert not recovery.is_rebuilding
    for num_in_a_row in (1, 4):  # there was a token between
        recovery.overflowed(num_in_a_row)
    assert recovery.is_rebuilding
    rebuilt.clear()
    await rebuilt.wait()


@pytest.mark.parametrize(
    "message",
    [
        "ImportError: tokenizers.abi3.so: failed to map segment from shared object",
        "MemoryError: ",
        "_ArrayMemoryError: Unable to allocate 7.63 MiB for an array with shape (1000000,)",
        "ModuleNotFoundError: Could not import module 'LlamaConfig'. Are this object's require",
        "OSError: [Errno 24] Too many open files",
        "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
    ],
)
async def test_what_every_process_needs_is_not_held_against_a_request(message: str) -> None:
    recovery, _, _ = _recovery(0)
    recovery.step_failed(message, 1)
    assert recovery.is_rebuilding


async def test_a_step_too_large_for_a_gpu_is_isolated_before_it_costs_the_stages() -> None:
    recovery, _, _ = _recovery(0)
    message = f"{torch.OutOfMemoryError.__name__}: CUDA out of memory. Tried to allocate 2.00 GiB."
    for num_in_a_row in (1, 2, 3):
        recovery.step_failed(message, num_in_a_row)
        assert not recovery.is_rebuilding
    recovery.step_failed(message, 4)
    assert recovery.is_rebuilding


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=6),
    st.lists(st.sampled_from(["answer", "abort", "lose", "lose", "lose at once"]), max_size=12),
    st.integers(1, 3),
    st.booleans(),
)
def test_what_fronts_are_told_of_a_loss_is_what_becomes_of_it(
    asked: list[tuple[int, int]], script: list[str], num_stages: int, lookahead: bool
) -> None:
    """They send these requests elsewhere before their engine makes anything of the loss."""
    driver = Driver(config(num_stages=num_stages, lookahead=lookahead, token_budget=8))
    for number, (prompt, output) in enumerate(asked):
        driver.submit(request(number, prompt=prompt, output=output))
    for number, action in enumerate(script):
        core = driver.core
        if action == "answer" and driver.outstanding:
            driver.answer()
        elif action == "abort" and core.live_requests:
            driver.abort(list(core.live_requests)[number % len(core.live_requests)])
        elif action.startswith("lose"):
            first = core.in_flight[-1].plan.step_id if core.in_flight else None
            first_dropped = first if action == "lose at once" else None
            told, ends = suspects_of_loss(core, True, first_dropped)
            driver.outstanding.clear()
            driver.failures += 1
            driver.stages.lose()
            driver.send(PipelineLost(first_dropped=first_dropped))
            failed = [
                n for n, c in driver.callers.items() if c.finish is FinishReason.ERROR
                and n in dict(told.losses)
            ]  # fmt: skip
            assert [output.request_id for output in ends] == failed
            now, before = (
                {n: losses for n, losses in suspects.losses if n in core.live_requests}
                for suspects in (suspects_of(core), told)
            )
            assert now == before
            assert told.stages_are_lost
    driver.drain()
