"""A load that triples: its arrivals, and what is told of each part."""

from __future__ import annotations

import math
from typing import Any

import pytest

from app.bench.chaos.own_server import OwnServer
from app.bench.load.client import Job, Trace
from app.bench.report import MeasurementError
from app.bench.studies.scaling import FILL, STARTS_S, base_qps, simulated
from app.bench.studies.scaling_parts import (
    FACTOR,
    Phases,
    Tripled,
    changes,
    joins,
    mean_prompt_tokens,
    parts_of,
)
from app.simulate.hardware.deployments import load_model
from app.simulate.run.deployment import Deployment
from app.simulate.run.simulation import scheduler_config

PHASES = Phases(20.0, 60.0, 30.0)
LOOKS = [(0.5, 1), (19.0, 1), (32.0, 2), (50.0, 3), (79.0, 3), (95.0, 2), (100.0, 1)]
OBJECTIVES = {"tbt_ms": 100.0, "ttft_ms": 2000.0}


def trace(arrival_s: float, gap_s: float = 0.05, error: str | None = None) -> Trace:
    times_s = [] if error else [arrival_s + 0.5, arrival_s + 0.5 + gap_s]
    return Trace(Job(arrival_s, 8, 2), arrival_s, times_s, 0 if error else 2, error)


def test_arrivals_triple_and_fall_again() -> None:
    load = Tripled("64x8", None, Phases(200.0, 200.0, 200.0), seed=1)
    jobs = load.jobs(2.0)
    assert jobs == load.jobs(2.0)
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    counts = [sum(200 * n <= job.arrival_s < 200 * (n + 1) for job in jobs) for n in range(3)]
    assert counts == pytest.approx([400, 1200, 400], rel=0.2)


class Server(OwnServer):
    """Its engines are given."""

    def __init__(self, *rates: float) -> None:
        self.rates = rates

    def engines(self) -> list[dict[str, Any]]:
        return [{"prefill_rate": rate} for rate in self.rates]


def test_the_base_rate_is_work_for_one_engine_and_the_triple_for_three() -> None:
    assert mean_prompt_tokens("256x64") == 256
    qps = base_qps(Server(8000.0), "256x64", target=0.1)
    demand = qps * 256 / 8000.0
    assert demand == pytest.approx(FILL * 0.1)
    assert (math.ceil(demand / 0.1), math.ceil(FACTOR * demand / 0.1)) == (1, 3)
    for server in (Server(), Server(0.0)):
        with pytest.raises(MeasurementError, match="--qps"):
            base_qps(server, "256x64", target=0.1)


@pytest.mark.heavy
def test_simulated_engines_start_as_late_as_live_ones() -> None:
    model = load_model("llama-135m-cpu-2-cores")
    config = scheduler_config(model, budget="adaptive", tbt_s=0.1, ttft_s=2.0)
    jobs = Tripled("64x8", None, Phases(20.0, 60.0, 20.0)).jobs(qps=3.0)
    options = {"target": 0.06, "ahead_s": 20.0, "smoothing_s": 10.0, "calm_s": 20.0}

    def run(joined_s: list[float]) -> dict[str, Any]:
        return simulated(jobs, Deployment(config, model), options, joined_s, OBJECTIVES)

    alone = run([])
    assert alone["start_s"] == STARTS_S
    wanted_s = next(row["at_s"] for row in alone["wanted"] if row["engines"] == 2)
    found = run([wanted_s + 12.0, wanted_s + 40.0])
    assert found["start_s"] == 12.0
    serve_s = next(row["at_s"] for row in found["engines"] if row["engines"] == 2)
    assert serve_s == pytest.approx(wanted_s + 12.0, abs=2.0)  # seen at the next decision
    assert found["most_engines"] == 3
    assert 0.9 < found["kept"] <= 1.0


def test_engines_over_time() -> None:
    steps = [(row["at_s"], row["engines"]) for row in changes(LOOKS)]
    assert steps == [(0.0, 1), (32.0, 2), (50.0, 3), (95.0, 2), (100.0, 1)]
    assert joins(LOOKS) == [32.0, 50.0]
    assert joins([(0.5, 1), (3.0, 3)]) == [3.0, 3.0]


def test_each_part_tells_of_its_own_arrivals() -> None:
    traces = [
        trace(1.0),
        trace(25.0, gap_s=0.3),
        trace(60.0),
        trace(61.0, error="cut"),
        trace(90.0),
    ]
    parts = {part.name: part for part in parts_of(traces, LOOKS, PHASES, OBJECTIVES)}
    assert list(parts) == ["before", "tripled, engines starting", "tripled, all engines", "after"]
    starting, whole = parts["tripled, engines starting"], parts["tripled, all engines"]
    assert (starting.from_s, starting.to_s, starting.kept) == (20.0, 50.0, 0.0)
    assert (whole.num_requests, whole.num_cut, whole.kept) == (2, 1, 0.5)
    assert parts["before"].ttft_p50_ms == pytest.approx(500.0)
    assert parts["after"].kept == 1.0


def test_engines_that_never_come_leave_one_part_less() -> None:
    names = [part.name for part in parts_of([trace(25.0)], [(0.5, 1)], PHASES, OBJECTIVES)]
    assert names == ["tripled, all engines"]
