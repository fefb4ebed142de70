"""Admission, simulated: promises kept under overload, refusals that tell the truth."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from actors.scheduling.cost.model import CostModel
from app.simulate.run.simulation import Deployment, SimulatedRun, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import fixed_lengths
from app.simulate.workload.requests import Workload, generate

pytestmark = pytest.mark.heavy

MODEL = CostModel(
    "m",
    ((1, 0.010), (32, 0.010), (2048, 0.200)),
    decode_kv_s=2e-8,
    kv_tokens=60_000,
    max_model_len=4096,
)


@functools.cache
def overload(factor: float, admission: str, seconds: float = 20.0) -> SimulatedRun:
    """Prompts of 800 and outputs of 60: an engine that can serve about 9 of them a second."""
    qps = 9.0 * factor
    workload: Workload = generate(poisson(qps), fixed_lengths(800, 60), int(qps * seconds))
    config = scheduler_config(
        MODEL, budget="adaptive", admission=admission, tbt_s=0.06, ttft_s=2.0, max_requests=64
    )
    return simulate(workload, Deployment(config, MODEL))


def test_below_capacity_no_request_is_refused() -> None:
    assert overload(0.5, "predictive").summary().num_refused == 0


@pytest.mark.parametrize("tbt_s", [0.1, 1.0])
def test_a_burst_on_an_idle_engine_is_not_refused_for_the_objective_of_streams(
    tbt_s: float,
) -> None:
    """Twice as many as may run: the second half waits for the first streams, whose pace is not
    known before their second tokens; it is the engine's, however loose the objective is."""
    workload = generate(poisson(400.0), fixed_lengths(100, 100), 16)
    config = scheduler_config(
        MODEL, budget="adaptive", admission="predictive", tbt_s=tbt_s, ttft_s=5.0, max_requests=8
    )
    result = simulate(workload, Deployment(config, MODEL))
    assert result.summary().num_refused == 0
    ttft_s = np.array(result.record.first_token_s) - np.array(result.record.arrival_s)
    assert 1.0 < ttft_s.max() < 5.0


@pytest.mark.parametrize("factor", [3.0, 10.0])
def test_overload_is_shed_and_goodput_kept(factor: float) -> None:
    peak = max(overload(f, "predictive").summary().goodput for f in (0.8, 1.0, 1.1))
    result = overload(factor, "predictive")
    summary = result.summary()
    assert summary.num_refused > 0
    assert summary.tbt_max <= 0.06
    assert summary.goodput >= 0.9 * peak
    # The same overload with every request admitted serves hardly any in time.
    assert overload(factor, "all").summary().goodput < 0.3 * peak


def test_retry_after_is_truthful() -> None:
    """A client that comes again when told is accepted, unless newcomers took its place."""
    first = overload(3.0, "predictive", seconds=30.0)
    refused = ~np.isnan(np.array(first.record.refused_s))
    retry_s = (np.array(first.record.arrival_s) + np.array(first.record.retry_after_s))[refused]
    assert (np.array(first.record.retry_after_s)[refused] > 0).all()
    original = first.workload
    order = np.argsort(retry_s)
    arrivals = np.concatenate([original.arrival_s[~refused], retry_s[order]])
    again = np.argsort(arrivals, kind="stable")
    prompts = np.full(len(arrivals), 800)
    outputs = np.full(len(arrivals), 60)
    is_retry = np.concatenate([np.zeros((~refused).sum(), bool), np.ones(refused.sum(), bool)])[
        again
    ]
    second = simulate(Workload(arrivals[again], prompts, outputs), first.deployment)
    refused_again = ~np.isnan(np.array(second.record.refused_s))
    after = is_retry & (arrivals[again] > original.arrival_s[-1])  # no newcomers any more
    assert after.sum() > 100
    assert refused_again[after].mean() < 0.02
    assert refused_again[is_retry].mean() < 0.5


def test_queue_action_admits_every_request() -> None:
    config = scheduler_config(
        MODEL, budget="adaptive", admission="predictive", tbt_s=0.06, ttft_s=2.0,
        admission_options={"action": "queue"}, order="deadline",
    )  # fmt: skip
    workload = generate(poisson(20.0), fixed_lengths(800, 40), 200)
    summary = simulate(workload, Deployment(config, MODEL)).summary()
    assert summary.num_refused == 0
    assert summary.num_completed == 200
    assert summary.tbt_max <= 0.06


def test_predicted_peak_avoids_preemption() -> None:
    tight = CostModel.from_dict({**MODEL.to_dict(), "kv_tokens": 6000})
    workload = generate(poisson(30.0), fixed_lengths(200, 300), 100)
    preempted = {}
    for admission in ("all", "predicted_peak"):
        config = scheduler_config(tight, admission=admission, max_requests=64)
        result = simulate(workload, Deployment(config, tight))
        summary = result.summary()
        assert summary.num_completed == 100
        preempted[admission] = summary.num_preemptions
    assert preempted["all"] > 0
    assert preempted["predicted_peak"] == 0


@pytest.mark.parametrize("factor", [3.0, 10.0])
def test_accepted_requests_get_their_first_token_in_time(factor: float) -> None:
    """Some are accepted while the composition of the batch changes, hence a share."""
    result = overload(factor, "predictive")
    record = result.record
    ttft = np.array(record.first_token_s) - np.array(record.arrival_s)
    accepted = np.isnan(np.array(record.refused_s))
    assert (ttft[accepted] <= 2.0).mean() >= 0.99


def test_memory_counts_as_a_place() -> None:
    """With KV for a few requests only, their ends set the pace, not compute."""
    tight = CostModel.from_dict({**MODEL.to_dict(), "kv_tokens": 8000})
    config = scheduler_config(
        tight, budget="adaptive", admission="predictive", tbt_s=0.06, ttft_s=2.0, max_requests=64
    )
    workload = generate(poisson(40.0), fixed_lengths(800, 60), 1200)
    summary = simulate(workload, Deployment(config, tight)).summary()
    assert summary.num_refused > 0
    assert summary.ttft_p90 <= 2.0
