"""Profiles: a known machine is found again, from noisy steps, with an honest held-out error."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from actors.calibration.fit import Measurement, fit, predict
from actors.scheduling.cost.model import CostModel
from actors.scheduling.plan import StepShape
from app.simulate.hardware.profile import (
    EngineLimits,
    grid,
    measure,
    profile,
    write_measurements,
)

TRUTH = CostModel(
    "machine",
    ((1, 0.006), (32, 0.0065), (512, 0.11), (2048, 0.45)),
    overhead_s=0.0005,
    per_request_s=2e-5,
    decode_kv_s=5e-8,
    prefill_pair_s=3e-8,
)
LIMITS = EngineLimits(max_step_tokens=2048, max_requests=64, max_model_len=4096, kv_tokens=60_000)
BLANK = CostModel("fitted", ((1, 1.0),), kv_tokens=60_000)


def test_a_known_machine_is_found_from_noisy_steps() -> None:
    rng = random.Random(7)
    model, report, _ = profile(
        lambda shape: predict(TRUTH, shape) * rng.lognormvariate(0.0, 0.03), LIMITS, BLANK
    )
    assert report.median_error <= 0.05
    assert report.p95_error <= 0.15
    assert model.name == "fitted"
    assert model.kv_tokens == 60_000
    assert model.decode_kv_s == pytest.approx(5e-8, rel=0.15)
    assert model.prefill_pair_s == pytest.approx(3e-8, rel=0.15)
    assert 0.9 < model.ratio_at(0.05) < model.ratio_at(0.5) < model.ratio_at(0.95) < 1.1


def test_a_third_of_the_steps_disturbed_moves_nothing() -> None:
    rng = random.Random(3)
    disturbed = [
        Measurement(s, predict(TRUTH, s) * (rng.uniform(1.4, 2.0) if rng.random() < 0.33 else 1.0))
        for s in grid(LIMITS)
    ]
    model, report = fit(disturbed, BLANK)
    for shape in (StepShape(32, 32_000), StepShape(16, 8000, ((1000, 300),))):
        assert predict(model, shape) == pytest.approx(predict(TRUTH, shape), rel=0.03)
    assert report.p95_error > 0.2  # and the report does not hide them


def test_the_fit_never_sees_what_it_is_judged_by() -> None:
    """Steps of two machines cannot be explained at once, and the report must say so."""
    shapes = grid(LIMITS)
    mixed = [
        Measurement(s, predict(TRUTH, s) * (1.0 if i % 2 else 2.0)) for i, s in enumerate(shapes)
    ]
    _, report = fit(mixed, BLANK)
    assert report.p95_error > 0.2
    assert report.num_fitted + report.num_held_out == len(shapes)


def test_the_grid_respects_what_the_engine_holds() -> None:
    shapes = grid(LIMITS, num_mixed=60)
    assert len(shapes) == len(grid(LIMITS, num_mixed=60))
    for shape in shapes:
        assert 0 < shape.num_tokens <= LIMITS.max_step_tokens
        assert shape.num_decodes + len(shape.prefills) <= LIMITS.max_requests
        held = shape.decode_context_tokens + sum(s + n for s, n in shape.prefills)
        assert held <= LIMITS.kv_tokens
        assert all(s + n <= LIMITS.max_model_len for s, n in shape.prefills)
    assert any(s.num_decodes and s.prefills for s in shapes)


def test_a_hiccup_is_ignored_and_progress_is_told() -> None:
    calls: list[int] = []

    def step(shape: StepShape) -> float:
        calls.append(1)
        return 9.0 if len(calls) == 3 else 1.0

    told: list[tuple[int, int]] = []
    measured = measure(
        step, [StepShape(1, 4), StepShape(2, 8)], warm_up=1, on_progress=lambda *p: told.append(p)
    )
    assert [m.seconds for m in measured] == [1.0, 1.0]
    assert told[-1] == (6, 6)


def test_measurements_are_rows_of_parquet(tmp_path: Path) -> None:
    measured = [
        Measurement(StepShape(3, 30, ((5, 7), (0, 2))), 0.5),
        Measurement(StepShape(0, 0, ((0, 9),)), 0.25),
        Measurement(StepShape(2, 9), 0.125),
    ]
    write_measurements(measured, tmp_path / "m.parquet")
    rows = pq.read_table(tmp_path / "m.parquet").to_pylist()
    assert rows[0] == {
        "num_decodes": 3,
        "decode_context_tokens": 30,
        "prefill_starts": [5, 0],
        "prefill_tokens": [7, 2],
        "seconds": 0.5,
    }
    assert [(row["num_decodes"], row["prefill_tokens"]) for row in rows[1:]] == [(0, [9]), (2, [])]
