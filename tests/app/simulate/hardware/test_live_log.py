"""What a log tells: every step with its make-up and time, and how far a profile is from it."""

from __future__ import annotations

import random

import pytest

from actors.calibration.fit import predict
from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.scheduling.event_log import Recorder, Row
from actors.scheduling.events import Reconfigure, Submit
from actors.scheduling.plan import Slice, StepShape
from actors.scheduling.request import Request, SamplingParams
from app.simulate.hardware.live_log import ratios, runs, shape_of, slowdown
from app.simulate.hardware.step_ratios import StepRatios
from app.simulate.run.record import RunRecord
from app.simulate.run.replica import Replica
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import fixed_interval
from app.simulate.workload.lengths import fixed_lengths
from app.simulate.workload.requests import generate

PROFILE = CostModel(
    "m",
    ((1, 0.010), (1024, 0.100)),
    overhead_s=0.001,
    per_request_s=1e-4,
    decode_kv_s=2e-8,
    prefill_pair_s=4e-9,
    kv_tokens=60_000,
)


def test_a_slice_of_one_token_is_a_decode() -> None:
    slices = (Slice(1, 9, 1, True), Slice(2, 0, 1, True), Slice(3, 16, 32, False))
    assert shape_of(slices) == StepShape(2, 11, ((16, 32),))


def log_of(model: CostModel) -> list[Row]:
    """Two runs of three requests each, a Reconfigure between them, on stages like `model`."""
    rows: list[Row] = []
    core = build_core(SchedulerConfig(num_blocks=1000, token_budget=64, prefix_cache=False))
    replica = Replica(Recorder(core, rows.append), model, RunRecord(6), host_s=0.002)  # type: ignore[arg-type]
    now_s = 0.0
    for first in (0, 3):
        if first:
            replica.submit(Reconfigure({"policy": "vllm"}), now_s)
        for index in range(first, first + 3):
            request = Request(index, (5,) * 200, SamplingParams(max_tokens=9, min_tokens=9), now_s)
            replica.num_live += 1
            replica.submit(Submit(request), now_s)
        while replica.num_live:
            now_s = replica.advance()
    return rows


def test_runs_hold_every_step_with_its_time() -> None:
    first, second = runs(log_of(PROFILE))
    for steps in (first, second):
        assert sum(s.shape.num_decodes for s in steps) >= 3 * 8
        assert sum(n for s in steps for _, n in s.shape.prefills) >= 3 * 190
        for step in steps:
            assert step.seconds == pytest.approx(predict(PROFILE, step.shape))
            assert step.answered_s - step.end_s == pytest.approx(0.002)


def test_a_slower_day_is_told_and_simulated() -> None:
    steps = runs(log_of(PROFILE))[0]
    halved = CostModel.from_dict(
        {**PROFILE.to_dict(), "overhead_s": 0.0, "tokens_s": [(1, 0.005), (1024, 0.05)]}
    )
    today = slowdown(steps, halved)
    assert 1.6 < today.ratio < 2.4
    assert today.median_error == pytest.approx(1.0 - 1.0 / today.ratio, abs=0.05)
    assert slowdown(steps, PROFILE).p95_error == pytest.approx(0.0, abs=1e-9)
    chance = random.Random(0)
    no_prefill_seen = ratios(steps[-3:], PROFILE)
    assert no_prefill_seen.draw(True, 0.01, chance) == pytest.approx(1.0)
    config = scheduler_config(PROFILE)
    traffic = generate(fixed_interval(2.0), fixed_lengths(100, 10), 5)
    plain, doubled = (
        simulate(traffic, Deployment(config, PROFILE, ratios=drawn)).summary().tbt_p50
        for drawn in (None, StepRatios([(0.01, 2.0)], []))
    )
    assert doubled == pytest.approx(2.0 * plain)


def test_a_step_is_slowed_as_its_like_was() -> None:
    short = [(0.001 * i, 2.0) for i in range(50)]
    long = [(0.1 + 0.001 * i, 1.25) for i in range(50)]
    drawn = StepRatios([(0.01, 3.0)], [*long, *short])
    chance = random.Random(0)
    for _ in range(50):
        assert drawn.draw(True, 0.01, chance) == 2.0
        assert drawn.draw(True, 9.0, chance) == 1.25
        assert drawn.draw(False, 0.01, chance) == 3.0
    with pytest.raises(ValueError, match="no steps"):
        StepRatios([], [])


def test_nothing_answered_tells_nothing() -> None:
    with pytest.raises(ValueError, match="no step"):
        slowdown([], PROFILE)
