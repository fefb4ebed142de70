"""When a step counts as stuck: with a hand-turned clock in the place of the event loop's."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from actors.scheduling.plan import StepPlan
from actors.steps_in_flight import StepDeadline

FLOOR_S = 10.0


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
    monkeypatch.setattr(
        "actors.steps_in_flight.time", SimpleNamespace(monotonic=lambda: loop.now_s)
    )
    return loop


def _plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, ())


def _deadline(overdue: list[float]) -> StepDeadline:
    deadline = StepDeadline(FLOOR_S, 5.0, overdue.append)
    deadline.observe(1, 0.001)  # something has been measured: the first step's grace is over
    return deadline


def test_a_stuck_step_is_told_once_at_its_limit(loop: _Loop) -> None:
    overdue: list[float] = []
    deadline = _deadline(overdue)
    deadline.submitted(_plan(0), 0.0, 0.1)
    loop.pass_time(FLOOR_S - 0.01)
    assert overdue == []
    loop.pass_time(0.02)
    assert overdue == [FLOOR_S]
    loop.pass_time(10 * FLOOR_S)
    assert overdue == [FLOOR_S]


def test_a_step_behind_another_has_its_time_from_when_that_was_answered(loop: _Loop) -> None:
    overdue: list[float] = []
    deadline = _deadline(overdue)
    deadline.submitted(_plan(0), 0.0, 0.1)
    deadline.submitted(_plan(1), 0.0, 0.1)
    loop.pass_time(9.0)
    deadline.answered(loop.now_s)
    loop.pass_time(9.0)
    assert overdue == []
    loop.pass_time(1.01)
    assert overdue == [FLOOR_S]


def test_a_long_limit_before_a_short_one_does_not_hide_it(loop: _Loop) -> None:
    overdue: list[float] = []
    deadline = _deadline(overdue)
    deadline.submitted(_plan(0), 0.0, 60.0)  # limit: 300 s
    deadline.submitted(_plan(1), 0.0, 0.1)
    deadline.answered(loop.now_s)
    loop.pass_time(FLOOR_S + 0.01)
    assert overdue == [FLOOR_S]


def test_answered_steps_need_no_timers_of_their_own(loop: _Loop) -> None:
    overdue: list[float] = []
    deadline = _deadline(overdue)
    for step in range(1000):
        deadline.submitted(_plan(step), loop.now_s, 0.1)
        loop.pass_time(0.02)
        deadline.answered(loop.now_s)
    loop.pass_time(100.0)
    assert overdue == []
    assert loop.num_timers <= 4  # 20 s of steps, looked after every 10 s


def test_nothing_is_overdue_after_clear(loop: _Loop) -> None:
    overdue: list[float] = []
    deadline = _deadline(overdue)
    deadline.submitted(_plan(0), 0.0, 0.1)
    deadline.clear()
    assert len(deadline) == 0
    loop.pass_time(100.0)
    assert overdue == []
