"""Validation's own arithmetic: a machine that is its profile is simulated as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.bench.load.client import Trace, jobs_of
from app.bench.load.generator import Limits, bisected
from app.bench.studies.budgets import simulated_capacity
from app.bench.studies.policies import Load
from app.bench.studies.validate import FIGURES, Run, live_figures, policy_changes, simulated_figures
from app.simulate.hardware.live_log import runs, slowdown
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import fixed_lengths
from app.simulate.workload.requests import generate
from tests.simulate.test_live_log import PROFILE, log_of


def test_what_is_calibrated_on_itself_differs_from_nothing() -> None:
    traffic = generate(poisson(3.0), fixed_lengths(300, 30), 60)
    config = scheduler_config(PROFILE, token_budget=64, lookahead=True)
    truth = simulate(traffic, Deployment(config, PROFILE, host_s=0.002)).summary()
    live = {name: 1000.0 * getattr(truth, name) for name in FIGURES}
    calibration = runs(log_of(PROFILE))[0]
    simulated = simulated_figures(jobs_of(traffic), config, PROFILE, calibration)
    run = Run("sarathi", 3.0, 0, live, simulated, slowdown(calibration, PROFILE))
    assert run.differences == pytest.approx(dict.fromkeys(FIGURES, 0.0), abs=0.01)
    assert run.to_dict()["steps"]["median_error"] == pytest.approx(0.0, abs=1e-9)


def test_a_run_with_failures_compares_with_nothing() -> None:
    job = jobs_of(generate(poisson(1.0), fixed_lengths(3, 3), 1))[0]
    with pytest.raises(RuntimeError, match="1 requests failed: full"):
        live_figures([Trace(job, error="full")])


def test_batches_are_capped_where_memory_is_reserved() -> None:
    assert policy_changes("orca")["policy_options"] == {"max_batch": 16}
    assert policy_changes("sarathi")["policy_options"] == {}


@pytest.mark.parametrize("guess_qps", [0.3, 5.0, 40.0])
def test_bisection_finds_the_edge_from_anywhere(guess_qps: float) -> None:
    assert 5.3 / 1.06 <= bisected(guess_qps, 0.05, lambda qps: qps <= 5.3) <= 5.3


def test_a_machine_that_passes_nothing_has_no_capacity() -> None:
    assert bisected(1.0, 0.05, lambda _: False) == 0.0


def test_the_simulated_capacity_lies_between_a_load_held_and_one_missed() -> None:
    config = scheduler_config(PROFILE, token_budget=64, lookahead=True)
    calibration = runs(log_of(PROFILE))[0]
    load = Load("300x30", 3.0, 20.0, num_long=0)
    limits = Limits(tbt_ms=1e6, ttft_p50_ms=200.0)
    qps = simulated_capacity(config, PROFILE, calibration, load, limits, 0.05)

    def median_ttft_ms(at_qps: float) -> float:
        jobs = replace(load, qps=at_qps).jobs()
        return simulated_figures(jobs, config, PROFILE, calibration)["ttft_p50"]

    assert median_ttft_ms(qps) <= 200.0 < median_ttft_ms(2 * qps)
