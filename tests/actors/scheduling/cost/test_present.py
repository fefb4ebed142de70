"""A machine that has just become busy: steps are planned by what the newest ones took."""

from __future__ import annotations

import random

import pytest

from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.cost.present import MOST, PresentSlowness
from actors.scheduling.plan import StepShape

PROFILE = CostModel("p", ((1, 0.010), (1024, 0.100)))
LONG, SHORT = StepShape(40, 4000, ((0, 600),)), StepShape(4, 400)


def usual_s(shape: StepShape) -> float:
    return PROFILE.stage_s(Mix.of_shape(shape))


def test_a_burst_after_a_calm_minute_is_planned_for_within_a_second() -> None:
    """Its kind's own bound and mean would lag behind for most of the next two hundred steps."""
    chance, busy = random.Random(1), 1.7
    online, mix = OnlineCostModel(PROFILE), Mix.of_shape(LONG)
    for _ in range(600):
        online.observe(LONG, usual_s(LONG) * chance.uniform(0.97, 1.03))
    num_over = 0
    for _ in range(60):
        took_s = busy * usual_s(LONG) * chance.uniform(0.97, 1.03)
        num_over += took_s > usual_s(LONG) * online.bound_factor(mix)
        online.observe(LONG, took_s)
    assert num_over <= 5
    assert online.ratio(mix) == pytest.approx(busy, rel=0.05)


def test_what_slows_the_steps_that_run_slows_those_planned_next() -> None:
    online, mix = OnlineCostModel(PROFILE), Mix.of_shape(LONG)
    for shape in (LONG, SHORT) * 100:
        online.observe(shape, usual_s(shape))
    for _ in range(200):  # two seconds of them
        online.observe(SHORT, 1.3 * usual_s(SHORT))
    assert online.ratio(mix) > 1.1
    for _ in range(400):
        online.observe(SHORT, usual_s(SHORT))
    assert online.ratio(mix) == pytest.approx(1.0, abs=0.02)


def test_on_a_calm_machine_nothing_is_added() -> None:
    chance, online = random.Random(2), OnlineCostModel(PROFILE)
    for _ in range(600):
        online.observe(LONG, usual_s(LONG) * chance.lognormvariate(0.0, 0.05))
    bounds = []
    for _ in range(300):
        online.observe(LONG, usual_s(LONG) * chance.lognormvariate(0.0, 0.05))
        bounds.append(online.bound_factor(Mix.of_shape(LONG)))
    assert sum(bounds) / len(bounds) < 1.05 * 1.12  # the quantile of the noise is 1.12


def test_one_long_delay_counts_little_and_fast_steps_promise_nothing() -> None:
    present = PresentSlowness()
    present.add(3.0, 0.08)
    assert 0.0 < present.log_ratio < 0.2 * MOST
    for _ in range(200):
        present.add(-0.3, 0.08)
    assert present.log_ratio == 0.0
