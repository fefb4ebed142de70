"""Validation's own arithmetic: a machine that is its profile is simulated as it is."""

from __future__ import annotations

import pytest

from app.bench.client import Trace, jobs_of
from app.bench.validate import FIGURES, Run, live_figures, policy_changes, simulated_figures
from app.simulate.arrivals import poisson
from app.simulate.lengths import fixed_lengths
from app.simulate.live_log import mood, runs
from app.simulate.run import Deployment, scheduler_config, simulate
from app.simulate.workload import generate
from tests.simulate.test_live_log import PROFILE, log_of


def test_what_is_calibrated_on_itself_differs_from_nothing() -> None:
    traffic = generate(poisson(3.0), fixed_lengths(300, 30), 60)
    config = scheduler_config(PROFILE, token_budget=64, lookahead=True)
    truth = simulate(traffic, Deployment(config, PROFILE, host_s=0.002)).summary()
    live = {name: 1000.0 * getattr(truth, name) for name in FIGURES}
    calibration = runs(log_of(PROFILE))[0]
    simulated = simulated_figures(jobs_of(traffic), config, PROFILE, calibration)
    run = Run("sarathi", 3.0, 0, live, simulated, mood(calibration, PROFILE))
    assert run.differences == pytest.approx(dict.fromkeys(FIGURES, 0.0), abs=0.01)
    assert run.to_dict()["steps"]["median_error"] == pytest.approx(0.0, abs=1e-9)


def test_a_run_with_failures_compares_with_nothing() -> None:
    job = jobs_of(generate(poisson(1.0), fixed_lengths(3, 3), 1))[0]
    with pytest.raises(RuntimeError, match="1 requests failed: full"):
        live_figures([Trace(job, error="full")])


def test_batches_are_capped_where_memory_is_reserved() -> None:
    assert policy_changes("orca")["policy_options"] == {"max_batch": 16}
    assert policy_changes("sarathi")["policy_options"] == {}
