"""Traces and figures written by hand, as a load client would have seen them."""

from __future__ import annotations

from app.bench.load.client import Job, Trace
from app.bench.load.figures import LoadFigures, load_figures


def trace(arrival_s: float, *times_s: float, error: str | None = None) -> Trace:
    """One request whose tokens arrived at these times; all its tokens did."""
    job = Job(arrival_s, 8, len(times_s))
    seen = Trace(job, sent_s=arrival_s, event_times_s=list(times_s), error=error)
    seen.num_tokens = len(times_s)
    return seen


def steady(qps: float, ttft_s: float, tbt_s: float) -> LoadFigures:
    """Ten requests of four tokens, all alike."""
    arrivals = [number / qps for number in range(10)]
    return load_figures(
        [trace(at, *(at + ttft_s + tbt_s * token for token in range(4))) for at in arrivals]
    )
