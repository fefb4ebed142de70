"""When a step counts as stuck: with a hand-turned clock in the place of the event loop's."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import pytest

from actors.engine.step_deadline import StepDeadline
from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import PipelineLost, StepDone, Submit
from actors.scheduling.plan import StepResult, StepShape
from actors.scheduling.request import Request, SamplingParams
from actors.transport.running_time import LOOKS

FLOOR_S = 10.0
LATE = f"no answer within {FLOOR_S:.1f} s"


class _Timer:
    def __init__(self, due_s: float, call: Callable[[], None]) -> None:
        self.due_s, self.call, self.cancelled = due_s, call, False

    def cancel(self) -> None:
        self.cancelled = True

    def __lt__(self, other: _Timer) -> bool:
        return self.due_s < other.due_s


class _Loop:
    """The one method of an event loop that the deadline uses."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_timers = 0
        self._timers: list[_Timer] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> _Timer:
        timer = _Timer(self.now_s + delay_s, call)
        self.num_timers += 1
        heapq.heappush(self._timers, timer)
        return timer

    def stand_still(self, seconds: float) -> None:
        """The clock goes on, and no timer runs before its end."""
        self.now_s += seconds
        late = [timer for timer in self._timers if timer.due_s <= self.now_s]
        self._timers = [timer for timer in self._timers if timer.due_s > self.now_s]
        heapq.heapify(self._timers)
        for timer in sorted(late):
            if not timer.cancelled:
                timer.call()

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._timers and self._timers[0].due_s <= end_s:
            timer = heapq.heappop(self._timers)
            self.now_s = timer.due_s
            if not timer.cancelled:
                timer.call()
        self.now_s = end_s


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> _Loop:
    loop = _Loop()
    monkeypatch.setattr("asyncio.get_running_loop", lambda: loop)
    return loop


class _Steps:
    """Predicts what it is told, step by step, and then 0.1 s."""

    def __init__(self, *steps_s: float) -> None:
        self.steps_s = list(steps_s)

    def step_s(self, shape: StepShape) -> float:
        return self.steps_s.pop(0) if self.steps_s else 0.1

    def latency_s(self, shape: StepShape) -> float:
        return 0.1

    def swap_s(self, num_blocks: int) -> float:
        return 0.0

    def observe(self, shape: StepShape, duration_s: float) -> None:
        pass


class _Engine:
    """A core whose steps are watched: one request for each step that may be in flight."""

    def __init__(self, loop: _Loop, *predicted_s: float, depth: int = 1) -> None:
        config = SchedulerConfig(
            num_blocks=64, num_stages=depth, lookahead=False, max_model_len=512,
            drafter="none",  # which would ask for predictions of its own
        )  # fmt: skip
        self.loop = loop
        self.core = build_core(config, cost_model=_Steps(*predicted_s))
        self.lost: list[str] = []
        self.deadline = StepDeadline(self.core, FLOOR_S, 5.0, self.lost.append, lambda: loop.now_s)
        self.deadline.slowest_token_s = 0.001  # measured before: the first step's grace is over
        for request_id in range(depth):
            sampling = SamplingParams(300, min_tokens=300)
            self._handle(Submit(Request(request_id, (7, 7), sampling, loop.now_s)))
        assert len(self.core.in_flight) == depth

    def _handle(self, event: Submit | StepDone | PipelineLost) -> None:
        self.core.handle(event, self.loop.now_s)
        if self.deadline.timer is None:
            self.deadline.watch()

    def answer(self) -> None:
        step = self.core.in_flight[0]
        tokens = tuple((s.request_id, 9) for s in step.plan.named_slices)
        self._handle(StepDone(StepResult(step.plan.step_id, tokens)))


def test_a_stuck_step_is_told_once_at_its_limit(loop: _Loop) -> None:
    engine = _Engine(loop)
    loop.pass_time(FLOOR_S - 0.01)
    assert engine.lost == []
    loop.pass_time(0.02)
    assert engine.lost == [LATE]
    loop.pass_time(10 * FLOOR_S)
    assert engine.lost == [LATE]


def test_a_step_behind_another_has_its_time_from_when_that_was_answered(loop: _Loop) -> None:
    engine = _Engine(loop, depth=2)
    loop.pass_time(9.0)
    engine.answer()
    loop.pass_time(9.0)
    assert engine.lost == []
    loop.pass_time(1.01)
    assert engine.lost == [LATE]


def test_a_long_limit_before_a_short_one_does_not_hide_it(loop: _Loop) -> None:
    engine = _Engine(loop, 60.0, depth=2)  # limit of the first: 300 s
    engine.answer()
    loop.pass_time(FLOOR_S + 0.01)
    assert engine.lost == [LATE]


def test_a_long_step_has_its_time(loop: _Loop) -> None:
    engine = _Engine(loop, 60.0)
    loop.pass_time(299.0)
    assert engine.lost == []
    loop.pass_time(1.01)
    assert engine.lost == ["no answer within 300.0 s"]


@pytest.mark.parametrize("still_s", [FLOOR_S, 9 * FLOOR_S])
def test_time_in_which_the_engine_stood_still_is_no_time_of_a_step(
    loop: _Loop, still_s: float
) -> None:
    engine = _Engine(loop)
    loop.pass_time(FLOOR_S / 2)
    loop.stand_still(still_s)
    loop.pass_time(FLOOR_S / 2 - 2 * FLOOR_S / LOOKS - 0.01)
    assert engine.lost == []
    engine.answer()
    loop.pass_time(FLOOR_S - 0.01)  # the next step has its whole time
    assert engine.lost == []
    loop.pass_time(0.02)
    assert engine.lost == [LATE]


def test_a_step_is_half_over_once_the_engine_has_run_for_so_long(loop: _Loop) -> None:
    engine = _Engine(loop)
    loop.stand_still(9 * FLOOR_S)
    assert not engine.deadline.is_half_over
    loop.pass_time(FLOOR_S / 2)
    assert engine.deadline.is_half_over
    engine.answer()
    assert not engine.deadline.is_half_over


def test_a_stuck_step_is_found_after_the_engine_stood_still(loop: _Loop) -> None:
    engine = _Engine(loop)
    loop.stand_still(9 * FLOOR_S)
    assert engine.lost == []
    loop.pass_time(FLOOR_S)
    assert engine.lost == [LATE]


def test_a_busy_loop_that_looks_late_finds_a_stuck_step_in_time(loop: _Loop) -> None:
    engine = _Engine(loop)
    while loop.now_s < FLOOR_S:
        assert engine.lost == []
        loop.stand_still(2 * FLOOR_S / LOOKS)  # each look comes a whole period late
    assert engine.lost == [LATE]


def test_steps_need_no_timers_of_their_own(loop: _Loop) -> None:
    engine = _Engine(loop)
    for _ in range(200):
        loop.pass_time(0.1)
        engine.answer()
    assert loop.num_timers <= 2 * LOOKS + 1  # 20 s of steps, with a floor of 10 s
    assert engine.lost == []


def test_an_engine_at_rest_is_not_looked_after(loop: _Loop) -> None:
    engine = _Engine(loop)
    while engine.core.in_flight:
        loop.pass_time(0.01)
        engine.answer()
    loop.pass_time(100.0)
    before = loop.num_timers
    loop.pass_time(100.0)
    assert (engine.lost, loop.num_timers) == ([], before)


def test_steps_of_a_lost_pipeline_are_planned_anew_with_their_whole_time(loop: _Loop) -> None:
    engine = _Engine(loop)
    loop.pass_time(9.0)
    engine._handle(PipelineLost())
    loop.pass_time(FLOOR_S - 0.01)
    assert engine.lost == []
    loop.pass_time(0.02)
    assert engine.lost == [LATE]
