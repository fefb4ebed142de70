"""Time beyond a step's own: what is left of a limit for arrivals and for the way to the client."""

from __future__ import annotations

import math
import random

import pytest

from actors.scheduling.budgets.adaptive import AdaptiveBudget
from actors.scheduling.budgets.slack import INITIAL_SHARE
from actors.scheduling.build import build_core
from actors.scheduling.cost.delays import (
    DELIVERIES,
    FADES,
    MOST,
    MOST_ARRIVALS,
    MOST_LEARNT,
    ArrivalCost,
    PresentSlowness,
    WayToClient,
)
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import Execute, Reconfigure, StepDone, Submit
from actors.scheduling.plan import StepResult, StepShape
from actors.scheduling.request import Request, SamplingParams
from tests.actors.scheduling.budgets.tiled_model import TILED
from tests.actors.scheduling.modeled import modeled

SHAPE = StepShape(1, 60, ((0, 64),))
PROFILE = CostModel("p", ((1, 0.010), (1024, 0.100)))
LONG, SHORT = StepShape(40, 4000, ((0, 600),)), StepShape(4, 400)


def test_the_largest_of_three_is_left() -> None:
    way = WayToClient(headroom=0.04, given_s=0.003)
    assert way.share(0.1) == 0.04
    assert way.share(0.05) == pytest.approx(0.06)
    assert way.share(0.01) == pytest.approx(0.1), "a tenth at most of what is given"
    way.took(0.012)
    assert way.share(0.1) == pytest.approx(0.12)
    assert way.share(0.02) == MOST_LEARNT, "steps must be possible"


def test_the_slowest_way_counts_and_fades() -> None:
    way = WayToClient(headroom=0.04, given_s=0.0)
    for seconds in (0.02, 0.004):  # of two replicas
        way.took(seconds)
    assert way.learnt_s == pytest.approx(0.02 - FADES * 0.016)
    for _ in range(60):
        way.took(0.004)
    assert way.learnt_s == pytest.approx(0.004, rel=0.01)


def _after_steps(each_s: float) -> ArrivalCost:
    """After 400 steps of random times, in every other of which one to three requests arrived."""
    cost, chance = OnlineCostModel(TILED), random.Random(1)
    arrivals, arrived = ArrivalCost(0.003), 0
    for step in range(400):
        number = chance.randint(1, 3) if step % 2 else 0
        took_s = TILED.stage_s(Mix.of_shape(SHAPE)) * chance.uniform(0.95, 1.05) + number * each_s
        cost.observe(SHAPE, took_s)
        arrived += number
        arrivals.answered(took_s, cost.usual_s(SHAPE))
        arrivals.planning(arrived)
    return arrivals


def test_what_an_arrival_costs_is_learnt() -> None:
    assert ArrivalCost(0.003).each_s == DELIVERIES * 0.003
    assert _after_steps(0.0).each_s < 0.0005, "noise costs nothing"
    # The mean of such steps rises by the mean of what arrivals add.
    assert 0.0004 < _after_steps(0.001).each_s < 0.001


def test_time_is_left_for_as_many_as_came_last() -> None:
    arrivals = ArrivalCost(0.003)
    assert arrivals.seconds(0.1, 0.0) == 0.0
    arrivals.planning(7)  # those before it was made
    assert arrivals.seconds(0.1, 0.0) == 0.0
    arrivals.planning(8)
    assert arrivals.seconds(0.1, 0.0) == pytest.approx(DELIVERIES * 0.003)
    assert arrivals.seconds(0.01, 0.0) == pytest.approx(MOST_ARRIVALS * 0.01), (
        "steps must be possible"
    )
    assert arrivals.seconds(math.inf, 0.0) == 0.0
    for _ in range(30):
        arrivals.planning(8)
    assert arrivals.seconds(0.1, 0.0) < 1e-5
    nothing = ArrivalCost(None)
    nothing.planning(0)
    nothing.planning(2)
    assert nothing.seconds(0.1, 0.0) == 0.0


def test_slow_steps_are_not_counted_twice() -> None:
    cost = OnlineCostModel(TILED)
    for factor in (1.0,) * 100 + (1.1,) * 100:
        cost.observe(SHAPE, factor * cost.usual_s(SHAPE))
    arrivals = ArrivalCost(0.003)
    arrivals.planning(0)
    arrivals.planning(1)
    assert cost.slowness > 0.03
    assert arrivals.seconds(0.1, cost.slowness) == 0.0


@pytest.mark.parametrize("budget", ["auto", "adaptive"])
def test_the_step_after_arrivals_is_shorter_than_the_next(budget: str) -> None:
    model = CostModel("linear", ((1, 0.010), (1024, 0.110)), kv_tokens=64_000, max_model_len=4096)
    core = build_core(
        modeled(model, budget=budget, max_requests=32, tbt_s=0.05, lookahead=False),
        cost_model=OnlineCostModel(model),
    )
    stream = Request(0, (1,) * 50, SamplingParams(500), 0.0)
    (plan,) = [i.plan for i in core.handle(Submit(stream), 0.0) if isinstance(i, Execute)]
    for number in (1, 2, 3):
        core.handle(Submit(Request(number, (2,) * 3000, SamplingParams(5), 0.01)), 0.01)
    sizes, now_s = [], 0.02
    for _ in range(2):
        done = StepDone(StepResult(plan.step_id, ((0, 9),)))
        (plan,) = [i.plan for i in core.handle(done, now_s) if isinstance(i, Execute)]
        sizes.append(plan.num_tokens)
        now_s += model.stage_s(Mix.of(plan.slices))
    beside, after = sizes
    assert (beside < after) if budget == "auto" else (beside == after)


def test_a_budget_made_while_requests_run_starts_anew() -> None:
    """Neither the requests before it nor the time before its first planning are its own."""
    core = build_core(
        modeled(TILED, budget="auto", max_requests=32, tbt_s=0.05),
        cost_model=OnlineCostModel(TILED),
    )
    for number in range(9):
        core.handle(Submit(Request(number, (1,) * 50, SamplingParams(500), 5000.0)), 5000.0)
    core.handle(Reconfigure({"delivery_ms": 4.0}), 5000.001)
    budget = core.builder.budget
    assert isinstance(budget, AdaptiveBudget)
    assert budget._way.given_s == 0.004, "it can change live"
    (step,) = core.in_flight
    done = StepDone(StepResult(step.plan.step_id, ((0, 9),)))
    core.handle(done, 5000.03)
    assert budget._arrivals.each_s == DELIVERIES * 0.004
    assert budget._arrivals.seconds(0.05, 0.0) == 0.0
    assert budget._outside.seconds == 0.0
    assert budget._kept.value == INITIAL_SHARE


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
