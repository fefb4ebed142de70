"""Learning on the job: the ratio follows, the quantile holds, one outlier does not throw it."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel, RecentQuantile
from actors.scheduling.plan import StepShape

PROFILE = CostModel("p", ((1, 0.010), (1024, 0.100)))
DECODES = StepShape(16, 1600)
MIXED = StepShape(16, 1600, ((0, 200),))


def test_before_any_step_it_is_the_profile() -> None:
    online = OnlineCostModel(PROFILE)
    assert online.step_s(DECODES) == PROFILE.stage_s(Mix.of_shape(DECODES))
    assert online.bound_factor(Mix.of_shape(DECODES)) == 1.0


def test_it_follows_a_machine_that_slowed_down_regime_by_regime() -> None:
    online = OnlineCostModel(PROFILE)
    profile_s = PROFILE.stage_s(Mix.of_shape(DECODES))
    for _ in range(300):
        online.observe(DECODES, 1.4 * profile_s)
    assert online.step_s(DECODES) == pytest.approx(1.4 * profile_s, rel=0.01)
    for _ in range(300):
        online.observe(MIXED, 0.9 * PROFILE.stage_s(Mix.of_shape(MIXED)))
    assert online.step_s(MIXED) == pytest.approx(0.9 * PROFILE.stage_s(Mix.of_shape(MIXED)))
    assert online.step_s(DECODES) == pytest.approx(1.4 * profile_s, rel=0.01)


def test_kinds_of_steps_never_met_take_over_a_slowness_but_no_speed() -> None:
    mix, profile_s = Mix.of_shape(MIXED), PROFILE.stage_s(Mix.of_shape(DECODES))
    for factor, expected in ((1.4, 1.4), (0.7, 1.0)):
        online = OnlineCostModel(PROFILE)
        for _ in range(100):
            online.observe(DECODES, factor * profile_s)
        assert online.ratio(mix) == pytest.approx(expected)
        assert online.bound_factor(mix) == pytest.approx(expected)


def test_the_held_out_error_of_the_profile_is_the_first_bound_and_fades() -> None:
    doubtful = CostModel("p", PROFILE.tokens_s, ratio_quantiles=((0.5, 1.0), (0.99, 1.3)))
    online, mix = OnlineCostModel(doubtful), Mix.of_shape(MIXED)
    assert online.bound_factor(mix) == pytest.approx(1.3)
    online.observe(MIXED, PROFILE.stage_s(mix))
    assert online.bound_factor(mix) == pytest.approx(1.3)
    for _ in range(300):
        online.observe(MIXED, PROFILE.stage_s(mix))
    assert online.bound_factor(mix) == pytest.approx(1.0)


def test_the_bound_holds_for_the_promised_share_of_steps() -> None:
    rng = random.Random(5)
    online = OnlineCostModel(PROFILE, quantile=0.95)
    mix, profile_s = Mix.of_shape(MIXED), PROFILE.stage_s(Mix.of_shape(MIXED))
    within = 0
    for step in range(6000):
        measured_s = profile_s * 1.2 * rng.lognormvariate(0.0, 0.08)
        if step >= 2000:
            within += measured_s <= profile_s * online.bound_factor(mix)
        online.observe(MIXED, measured_s)
    assert within / 4000 == pytest.approx(0.95, abs=0.02)


def test_a_cautious_bound_holds_for_more_steps_than_were_seen() -> None:
    rng = random.Random(5)
    online, mix = OnlineCostModel(PROFILE), Mix.of_shape(MIXED)
    profile_s = PROFILE.stage_s(mix)
    num_over = {1.0: 0, 1.5: 0}
    for _ in range(10_000):
        measured_s = profile_s * math.exp(rng.expovariate(15.0))
        for caution in num_over:
            num_over[caution] += measured_s > profile_s * online.bound_factor(mix, caution)
        online.observe(MIXED, measured_s)
    assert num_over[1.0] >= 100  # each bound is that of 200 steps
    assert 2 <= num_over[1.5] <= 50
    calm = OnlineCostModel(PROFILE)
    assert calm.bound_factor(mix, caution=1.5) == calm.bound_factor(mix)


def test_one_outlier_moves_the_mean_little() -> None:
    online = OnlineCostModel(PROFILE)
    profile_s = PROFILE.stage_s(Mix.of_shape(DECODES))
    for _ in range(100):
        online.observe(DECODES, profile_s)
    online.observe(DECODES, 50 * profile_s)
    assert online.step_s(DECODES) < 1.02 * profile_s


def test_swap_is_never_cheap_when_unmeasured() -> None:
    assert OnlineCostModel(PROFILE).swap_s(3) == float("inf")
    measured = CostModel("p", ((1, 0.01),), swap_block_s=0.25)
    assert OnlineCostModel(measured).swap_s(3) == 0.75


def test_the_next_engine_begins_with_what_this_one_learnt() -> None:
    online = OnlineCostModel(PROFILE)
    mix = Mix.of_shape(DECODES)
    for _ in range(300):
        online.observe(DECODES, 1.4 * PROFILE.stage_s(mix))
    kept = CostModel.from_dict(json.loads(json.dumps(online.learnt().to_dict())))
    later = OnlineCostModel(kept)
    assert later.ratio(mix) == pytest.approx(online.ratio(mix))
    assert later.bound_factor(mix) == pytest.approx(online.bound_factor(mix))
    for _ in range(300):  # and goes on learning
        later.observe(DECODES, PROFILE.stage_s(mix))
    assert later.bound_factor(mix) == pytest.approx(1.0)


def test_ratios_by_size_are_those_met_and_lie_between_and_beyond_them() -> None:
    cost = OnlineCostModel(PROFILE)
    assert cost.size_ratios(1024) == [1.0] * 12
    for num_tokens, ratio in ((20, 2.0), (300, 0.5)):
        shape = StepShape(4, 400, ((0, num_tokens - 4),))
        for _ in range(200):
            cost.observe(shape, ratio * cost.profile.stage_s(Mix.of_shape(shape)))
    ratios = cost.size_ratios(1024)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[:5] == pytest.approx([2.0] * 5, rel=0.02)
    assert ratios[(300).bit_length() :] == pytest.approx([0.5] * 3, rel=0.1)
    assert ratios[(100).bit_length()] == pytest.approx(1.0, rel=0.3)


@given(
    st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=60),
    st.integers(1, 20),
    st.floats(0.05, 0.95),
)
def test_a_recent_quantile_is_that_of_the_last_values_seeds_included(
    values: list[float], size: int, share: float
) -> None:
    recent = RecentQuantile(share, size, values[:2])
    for value in values[2:]:
        recent.add(value)
    kept = sorted(values[-size:])
    assert len(recent) == len(kept)
    assert recent.value == kept[int(share * (len(kept) - 1))]


def test_impossible_quantiles_are_refused() -> None:
    for share, size in ((0.0, 5), (1.0, 5), (0.5, 0)):
        with pytest.raises(ValueError, match="share"):
            RecentQuantile(share, size)


@pytest.mark.parametrize("stands_in", [False, True])
def test_smaller_steps_end_a_bad_moment_of_larger_ones_that_are_not_run(stands_in: bool) -> None:
    small, large = StepShape(16, 1600, ((0, 20),)), MIXED
    online = OnlineCostModel(PROFILE)
    online.stands_in = stands_in

    def run(shape: StepShape, factor: float, num_steps: int) -> None:
        for _ in range(num_steps):
            online.observe(shape, factor * PROFILE.stage_s(Mix.of_shape(shape)))

    usual = 1.2  # larger steps take more than their profile says, now and then
    run(small, 1.0, 100)
    run(large, usual, 250)
    run(small, 2.0, 20)
    run(large, 2.0 * usual, 20)
    bad = online.bound_factor(Mix.of_shape(large))
    assert bad > 1.4 * usual
    run(small, 1.0, 300)
    good = online.bound_factor(Mix.of_shape(large))
    if stands_in:
        assert good == pytest.approx(usual, rel=0.15)
    else:
        assert good > 1.4 * usual


def test_delays_of_short_steps_do_not_keep_the_bound_of_long_ones_high() -> None:
    """After a bad moment of long steps, one short step in ten takes 1.6 times as long."""
    small, large = StepShape(16, 1600, ((0, 20),)), MIXED
    online = OnlineCostModel(PROFILE)
    online.stands_in = True

    def run(shape: StepShape, num_steps: int, often: int, factor: float) -> None:
        for step in range(num_steps):
            delayed = factor if step % often == 0 else 1.0
            online.observe(shape, delayed * PROFILE.stage_s(Mix.of_shape(shape)))

    run(large, 250, 50, 1.1)
    run(large, 10, 2, 1.5)
    run(small, 400, 10, 1.6)
    mean = online.ratio(Mix.of_shape(large))
    assert online.bound_factor(Mix.of_shape(small)) > 1.45 * mean
    assert online.bound_factor(Mix.of_shape(large)) < 1.3 * mean


def test_a_kind_of_step_that_is_run_is_corrected_by_its_own_times_alone() -> None:
    small, large = StepShape(16, 1600, ((0, 20),)), MIXED
    online = OnlineCostModel(PROFILE)
    online.stands_in = True
    for step in range(400):
        online.observe(small, (1.0 + step % 7 / 20) * PROFILE.stage_s(Mix.of_shape(small)))
        online.observe(large, PROFILE.stage_s(Mix.of_shape(large)))
    assert online.bound_factor(Mix.of_shape(large)) == pytest.approx(1.0, rel=0.01)


def test_only_a_bound_that_is_worse_than_none_is_forgotten() -> None:
    """A profile measured beside other work has a wide error: what is learnt is better."""
    mix = Mix.of_shape(MIXED)
    for factor, is_forgotten in ((0.6, False), (3.0, True)):
        online = OnlineCostModel(PROFILE)
        for _ in range(300):
            online.observe(DECODES, PROFILE.stage_s(Mix.of_shape(DECODES)))
        for _ in range(60):
            online.observe(MIXED, factor * PROFILE.stage_s(mix))
        before = online.ratio(mix)
        online.forget(mix)
        assert (online.ratio(mix) != before) == is_forgotten
