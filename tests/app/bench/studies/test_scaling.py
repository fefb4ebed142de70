"""A load that triples: its arrivals, and what is told of each part."""

from __future__ import annotations

import pytest

from app.bench.load.client import Job, Trace
from app.bench.studies.scaling_parts import Phases, changes, cold_starts, parts_of, tripled

PHASES = Phases(20.0, 60.0, 30.0)
LOOKS = [(0.5, 1), (19.0, 1), (32.0, 2), (50.0, 3), (79.0, 3), (95.0, 2), (100.0, 1)]
OBJECTIVES = {"tbt_ms": 100.0, "ttft_ms": 2000.0}


def trace(arrival_s: float, gap_s: float = 0.05, error: str | None = None) -> Trace:
    times_s = [] if error else [arrival_s + 0.5, arrival_s + 0.5 + gap_s]
    return Trace(Job(arrival_s, 8, 2), arrival_s, times_s, 0 if error else 2, error)


def test_arrivals_triple_and_fall_again() -> None:
    jobs = tripled("64x8", 2.0, Phases(200.0, 200.0, 200.0), seed=1)
    assert jobs == tripled("64x8", 2.0, Phases(200.0, 200.0, 200.0), seed=1)
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    counts = [sum(200 * n <= job.arrival_s < 200 * (n + 1) for job in jobs) for n in range(3)]
    assert counts == pytest.approx([400, 1200, 400], rel=0.2)


def test_engines_over_time() -> None:
    steps = [(row["at_s"], row["engines"]) for row in changes(LOOKS)]
    assert steps == [(0.0, 1), (32.0, 2), (50.0, 3), (95.0, 2), (100.0, 1)]
    assert cold_starts(LOOKS, PHASES) == [12.0, 30.0]


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
