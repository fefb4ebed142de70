"""Loads: equal ones give equal requests, their lengths drawn or read."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import numpy as np
import pytest
import typer

from app.bench.load.workload import Load, lengths_of


def test_equal_loads_give_equal_jobs_in_order_of_arrival() -> None:
    load = Load("sharegpt/8", 5.0, 40.0, num_long=3, long_tokens=3000, seed=4)
    jobs = load.jobs()
    assert jobs == load.jobs()
    assert jobs != Load("sharegpt/8", 5.0, 40.0, num_long=3, long_tokens=3000, seed=5).jobs()
    arrivals = [job.arrival_s for job in jobs]
    assert arrivals == sorted(arrivals)
    assert [job.arrival_s for job in jobs if job.num_prompt_tokens == 3000] == [10.0, 20.0, 30.0]
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1 / 5.0, rel=0.3)


def test_the_rate_is_that_of_the_arrivals() -> None:
    """Not of the process that they are drawn from, of which a small load is a poor sample."""
    for qps in (0.75, 0.875, 1.0, 10.0):
        times = [job.arrival_s for job in Load("sharegpt/8", qps, 15.0).jobs()]
        assert (len(times) - 1) / (times[-1] - times[0]) == pytest.approx(qps)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("qps", [0.375, 0.5, 2.0, 10.0])
def test_a_load_takes_the_time_that_it_names(qps: float, seed: int) -> None:
    times = [job.arrival_s for job in Load("sharegpt/8", qps, 15.0, seed=seed).jobs()]
    assert times[0] == 0.0
    assert 15.0 - 2 / qps <= times[-1] < 15.0


def test_a_load_has_two_requests_at_least() -> None:
    assert [(j.num_prompt_tokens, j.num_output_tokens) for j in Load("7x3", 0.01, 1.0).jobs()] == [
        (7, 3)
    ] * 2


@pytest.mark.parametrize("name", ["chat", "12", "0x5", "sharegpt/no", "sharegpt/0", "x"])
def test_unknown_lengths_are_refused(name: str) -> None:
    with pytest.raises(typer.BadParameter):
        lengths_of(name)


def test_lengths_may_be_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens\n80,16\n")
    prompts, outputs = lengths_of(f"{file}/8")(3, np.random.default_rng(0))
    assert (prompts.tolist(), outputs.tolist()) == ([10] * 3, [2] * 3)
    assert lengths_of("configs/workloads/laptop.yaml")(3, np.random.default_rng(0))
    with pytest.raises(typer.BadParameter, match=r"gone\.csv"):
        lengths_of("gone.csv")
