"""A load as the paper's artifact measures it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from app.simulate.hardware.deployments import load_model
from app.simulate.paper import published
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.studies import artifact_load as load
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import fixed_lengths
from app.simulate.workload.requests import generate

MISTRAL = published.DEPLOYMENTS[0]


def case(**changes: object) -> load.Case:
    plain = load.Case(
        load_model(MISTRAL.model), "sharegpt4", MISTRAL.strict_s, 512, 16, (0.9, 2.7),
        rules=load.Rules(num_requests=48),
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_long_gaps_between_arrivals_are_cut() -> None:
    """A mean of 1 - 1 / e^3 is left."""
    times = load.own_arrivals(0.5)(4000, np.random.default_rng())
    gaps = np.diff(times)
    assert gaps.max() == pytest.approx(6.0)
    assert gaps.mean() == pytest.approx(2.0 * (1.0 - math.exp(-3.0)), rel=0.03)
    assert np.array_equal(times, load.own_arrivals(0.5)(4000, np.random.default_rng()))


def test_a_run_of_30_minutes_has_as_many_requests_as_arrive() -> None:
    timed = case(rules=load.Rules(own_arrivals=True, time_limit=True))
    assert load.traffic(timed, 0.1).arrival_s[-1] > load.TIME_LIMIT_S
    assert len(load.traffic(timed, 3.0)) == load.MOST_REQUESTS


def test_the_gap_behind_a_prompt_is_recorded_as_zero() -> None:
    """Of four requests at once the first three wait for the next prompt, then no gap is late."""
    model = load_model(MISTRAL.model)
    config = scheduler_config(model, policy="orca", max_requests=4, max_step_tokens=4096)
    workload = generate(poisson(1e6), fixed_lengths(4000, 3), 4)
    run = simulate(workload, Deployment(config, model), keep_steps=True)
    assert load.late_share(run, 0.2, first_gap=True) > 0.3
    assert load.late_share(run, 0.2, first_gap=False) < load.late_share(run, 0.2, True)
    assert run.record.gap_owner is not None
    assert len(run.record.gap_owner) == len(run.record.gaps_s) == 8


def test_delays_are_those_of_finished_requests() -> None:
    model = load_model(MISTRAL.model)
    config = scheduler_config(model, policy="orca", max_requests=1)
    workload = generate(poisson(1e3), fixed_lengths(1000, 100), 8)
    whole, cut = (simulate(workload, Deployment(config, model), until_s=s) for s in (1e9, 3.0))
    assert load.median_delay_s(cut) < load.median_delay_s(whole)
    assert load.median_delay_s(simulate(workload, Deployment(config, model), until_s=0)) > 1e9


def test_more_places_and_a_higher_objective_pass_more() -> None:
    loose = case(tbt_s=10.0)
    assert load.passes(loose, "sarathi", 1.0)
    assert not load.passes(loose, "sarathi", 30.0)
    assert not load.passes(case(tbt_s=1e-3), "orca", 0.5)


def test_a_rising_function_is_bisected() -> None:
    assert load.bisect(lambda x: x * x, 2.0, 0.0, 2.0) == pytest.approx(2.0**0.5, rel=1e-3)


@pytest.mark.heavy
def test_a_capacity_is_found_near_the_expected_one() -> None:
    found = load.highest_load(case(), "orca")
    assert load.passes(case(), "orca", 0.9 * found)
    with pytest.raises(ValueError, match="not near"):
        load.highest_load(case(around=(0.1, 0.1)), "orca")
