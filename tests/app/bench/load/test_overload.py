"""Overload: a refused request has no objective to keep, an accepted one has both."""

from __future__ import annotations

import math

import pytest

from app.bench.load.classes import class_figures, stream_jobs
from app.bench.load.overload import overload_figures
from app.bench.report import MeasurementError
from tests.app.bench.load.traces import trace


def test_only_what_was_taken_counts() -> None:
    kept = trace(0.0, 0.5, 0.55, 0.6)
    late = trace(1.0, 3.5, 3.55)  # first token beyond its objective
    stalled = trace(2.0, 2.5, 2.9)
    refused = trace(3.0, error="429: overloaded")
    refused.job = kept.job
    found = overload_figures([kept, late, stalled, refused], 3.0, tbt_ms=100, ttft_ms=2000)
    assert found.refused_share == 0.25
    assert found.kept_share == pytest.approx(1 / 3)
    assert found.gaps_kept_share == 0.75
    assert found.accepted.num_requests == 3
    assert found.accepted.goodput_qps == pytest.approx(1 / 3.55)
    num_tokens = kept.job.num_prompt_tokens + kept.num_tokens
    assert found.goodput_tokens_per_s == pytest.approx(num_tokens / 3.55)
    assert found.to_dict()["accepted"]["tbt_max_ms"] == pytest.approx(400)


def test_what_broke_was_not_kept() -> None:
    broken = trace(0.0, 0.5, error="500: broken")
    found = overload_figures([trace(0.0, 0.4), broken], 1.0, tbt_ms=100, ttft_ms=2000)
    assert (found.refused_share, found.kept_share) == (0.0, 0.5)
    assert (found.num_failed, found.first_error) == (1, "500: broken")


def test_a_refusal_that_comes_too_late_was_a_promise() -> None:
    soon, late = (trace(1.0, error="429: overloaded") for _ in range(2))
    soon.refused_s, late.refused_s = 2.9, 3.1
    found = overload_figures([trace(0.0, 0.4), soon, late], 1.0, tbt_ms=100, ttft_ms=2000)
    assert found.refused_share == pytest.approx(1 / 3)
    assert found.kept_share == 0.5
    assert (found.num_failed, found.first_error) == (0, None)


def test_a_load_that_is_refused_whole_is_a_row() -> None:
    """Those before it were measured."""
    found = overload_figures([trace(0.0, error="429: overloaded")] * 2, 1.0, 100, 2000)
    assert (found.num_requests, found.refused_share, found.num_failed) == (2, 1.0, 0)
    assert math.isnan(found.kept_share)
    assert found.goodput_tokens_per_s == 0.0


def test_streams_of_the_first_class_outlast_the_load_beside_them() -> None:
    jobs = stream_jobs(3, 8.0)
    assert [(job.arrival_s, job.num_output_tokens) for job in jobs] == [
        (0.0, 500),
        (0.05, 500),
        (0.1, 500),
    ]
    with pytest.raises(MeasurementError):
        class_figures([trace(0.0, error="503: gone")], 50.0)
