"""Calibration over stages whose every step takes what a known cost model says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.calibration.fit import predict
from actors.calibration.measure import EngineLimits, calibrate, check, shapes
from actors.calibration.probe import StepNotFinite
from actors.scheduling.cost.model import CostModel
from actors.scheduling.plan import StepPlan, StepResult, StepShape
from tests.actors.calibration.modeled_stages import LIMITS, TRUTH, Stages

BASE = CostModel("measured", tokens_s=((1, 1.0),), kv_tokens=LIMITS.kv_tokens)


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_it_finds_what_steps_cost(num_stages: int) -> None:
    stages = Stages(noise=0.05, num_stages=num_stages)
    found = await calibrate(stages.execute, LIMITS, BASE, stages.clock)
    assert not stages.known  # nothing is left behind
    for shape in (
        StepShape(1, 700),
        StepShape(8, 8 * 900),
        StepShape(30, 30 * 300, ((500, 200),)),
        StepShape(4, 4000, ((0, 900),)),
    ):
        assert predict(found.model, shape) == pytest.approx(predict(TRUTH, shape), rel=0.15)


def _read_experts(num_tokens: int, num_experts: int, per_token: int) -> float:
    """Share of the experts that some token reads, if each token draws its own evenly."""
    return 1.0 - (1.0 - per_token / num_experts) ** num_tokens


@pytest.mark.parametrize(("num_experts", "per_token"), [(0, 0), (8, 2), (32, 8), (128, 8)])
async def test_the_floor_of_a_mixture_of_experts_rises_with_the_first_tokens(
    num_experts: int, per_token: int
) -> None:
    """At any small number of tokens, measured or between; 0 experts: a dense model."""
    tokens = (*range(1, 257), 2048)
    experts_s = [
        0.02 * _read_experts(n, num_experts, per_token) if num_experts else 0.0 for n in tokens
    ]
    tokens_s = tuple((n, 0.004 + s + 1e-4 * n) for n, s in zip(tokens, experts_s, strict=True))
    truth = replace(TRUTH, tokens_s=tokens_s)
    stages = Stages(truth, noise=0.01)
    found = await calibrate(stages.execute, LIMITS, BASE, stages.clock)
    steps = [StepShape(n, 200 * n) for n in range(1, LIMITS.max_requests + 1)]
    steps += [StepShape(prefills=((0, n),)) for n in range(2, 65)]
    for shape in steps:
        assert predict(found.model, shape) == pytest.approx(predict(truth, shape), rel=0.035)


@pytest.mark.parametrize("disturbed_until_s", [0.1, 0.4, 1.5])
async def test_steps_that_a_start_disturbed_are_run_again(disturbed_until_s: float) -> None:
    stages = Stages(noise=0.02, disturbed_until_s=disturbed_until_s)
    found = await calibrate(stages.execute, LIMITS, BASE, stages.clock)
    assert not stages.known
    for shape in (StepShape(1, 700), StepShape(8, 8 * 900), StepShape(16, 16 * 256, ((0, 64),))):
        assert predict(found.model, shape) == pytest.approx(predict(TRUTH, shape), rel=0.08)
    assert found.model.ratio_at(0.99) < 1.12


async def test_a_repeat_that_overflows_leaves_the_first_measurement() -> None:
    stages, met = Stages(disturbed_until_s=0.4), set()

    async def execute(plan: StepPlan) -> StepResult:
        result = await stages.execute(plan)
        if plan.started:
            kind = tuple((part.start, part.num_tokens) for part in plan.named_slices)
            if kind in met:
                raise StepNotFinite("NotFinite")
            met.add(kind)
        return result

    found = await calibrate(execute, LIMITS, BASE, stages.clock)
    assert found.num_shapes >= 20
    assert not stages.known


async def test_it_takes_a_bounded_time() -> None:
    """Steps four times as slow, as of a larger model: fewer kinds, not four times the time."""
    for times, most_s, least in ((1, 8.0, 24), (12, 18.0, 20), (40, 18.0, 12)):
        truth = CostModel("slow", tokens_s=tuple((n, times * s) for n, s in TRUTH.tokens_s))
        stages = Stages(truth)
        found = await calibrate(stages.execute, LIMITS, BASE, stages.clock)
        assert found.seconds < most_s
        assert found.num_shapes >= least
        assert not stages.known
        for shape in (StepShape(1, 700), StepShape(8, 8 * 64), StepShape(prefills=((0, 16),))):
            assert predict(found.model, shape) == pytest.approx(predict(truth, shape), rel=0.15)


async def test_an_engine_with_no_room_for_steps_is_said_to_have_none() -> None:
    limits = EngineLimits(max_step_tokens=4, max_requests=2, max_model_len=64, kv_tokens=128)
    stages = Stages()
    with pytest.raises(ValueError, match="at least 12"):
        await calibrate(stages.execute, limits, BASE, stages.clock)
    assert not stages.known


async def test_a_known_model_is_checked_in_a_few_steps() -> None:
    stages = Stages(noise=0.1)
    checked = await check(stages.execute, LIMITS, TRUTH, stages.clock)
    assert checked is not None
    assert checked.model is TRUTH
    assert stages.num_steps < 20
    assert not stages.known
    foreign = CostModel("foreign", tokens_s=tuple((n, 3 * s) for n, s in TRUTH.tokens_s))
    for other in (Stages(foreign), Stages(TRUTH)):
        known = TRUTH if other.truth is foreign else foreign
        assert await check(other.execute, LIMITS, known, other.clock) is None
        assert not other.known


@pytest.mark.parametrize(("factor", "is_kept"), [(1.4, False), (1.15, True), (0.7, True)])
async def test_a_model_measured_beside_other_work_is_noticed(factor: float, is_kept: bool) -> None:
    """Its steps took longer than they do now. That they take longer now may pass."""
    stages = Stages(noise=0.05)
    known = CostModel("known", tokens_s=tuple((n, factor * s) for n, s in TRUTH.tokens_s))
    checked = await check(stages.execute, LIMITS, known, stages.clock)
    assert (checked is not None) == is_kept


async def test_a_known_model_outlasts_a_short_disturbance() -> None:
    stages = Stages(noise=0.1, disturbed_until_s=0.1, disturbance=3.0)
    checked = await check(stages.execute, LIMITS, TRUTH, stages.clock)
    assert checked is not None
    assert checked.model is TRUTH
    assert not stages.known


def test_kinds_of_steps_span_the_sizes_before_they_fill_in() -> None:
    sizes = [shape.num_tokens for shape in shapes(LIMITS)]
    grown = sizes.index(LIMITS.max_step_tokens // 2)  # 1024: the last power of four
    assert sizes[:grown] == sorted(sizes[:grown])
    assert set(sizes[:grown]) == {1, 4, 16, 64, 256}
    assert max(sizes) == LIMITS.max_step_tokens
