"""Validation's own arithmetic: a machine that is its profile is simulated as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.bench.load.capacity import CapacityObjective
from app.bench.load.client import Trace
from app.bench.load.workload import Load, jobs_of
from app.bench.report import MeasurementError
from app.bench.studies.budgets import simulated_capacity
from app.bench.studies.validate import (
    FIGURES,
    ValidationRun,
    live_figures,
    policy_changes,
    simulated_figures,
)
from app.simulate.hardware.live_log import runs, slowdown
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import fixed_lengths
from app.simulate.workload.requests import generate
from tests.app.simulate.hardware.test_live_log import PROFILE, log_of


def test_what_is_calibrated_on_itself_differs_from_nothing() -> None:
    traffic = generate(poisson(3.0), fixed_lengths(300, 30), 60)
    config = scheduler_config(PROFILE, token_budget=64, lookahead=True)
    truth = simulate(traffic, Deployment(config, PROFILE, host_s=0.002)).summary()
    live = {name: 1000.0 * getattr(truth, name) for name in FIGURES}
    calibration = runs(log_of(PROFILE))[0]
    simulated = simulated_figures(jobs_of(traffic), config, PROFILE, calibration)
    run = ValidationRun("sarathi", 3.0, 0, live, simulated, slowdown(calibration, PROFILE))
    assert run.differences == pytest.approx(dict.fromkeys(FIGURES, 0.0), abs=0.01)
    assert run.to_dict()["steps"]["median_error"] == pytest.approx(0.0, abs=1e-9)


def test_a_run_with_failures_compares_with_nothing() -> None:
    job = jobs_of(generate(poisson(1.0), fixed_lengths(3, 3), 1))[0]
    with pytest.raises(MeasurementError, match="1 requests failed: full"):
        live_figures([Trace(job, error="full")])


def test_batches_are_capped_where_memory_is_reserved() -> None:
    assert policy_changes("orca")["policy_options"] == {"max_batch": 16}
    assert policy_changes("sarathi")["policy_options"] == {}


def test_the_simulated_capacity_lies_between_a_load_held_and_one_missed() -> None:
    config = scheduler_config(PROFILE, token_budget=64, lookahead=True)
    calibration = runs(log_of(PROFILE))[0]
    load = Load("300x30", 3.0, 20.0)
    objective = CapacityObjective(tbt_ms=1e6, ttft_p50_ms=200.0)
    qps = simulated_capacity(config, PROFILE, calibration, load, objective, 0.05)

    def median_ttft_ms(at_qps: float) -> float:
        jobs = replace(load, qps=at_qps).jobs()
        return simulated_figures(jobs, config, PROFILE, calibration)["ttft_p50"]

    assert median_ttft_ms(qps) <= 200.0 < median_ttft_ms(2 * qps)
