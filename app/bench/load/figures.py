"""Figures from the traces of a run, by the same definitions as in the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from app.bench.load.client import Trace
from app.bench.report import MeasurementError
from app.bench.terminal import console, table
from app.telemetry.definitions import kept_objectives, quantile


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One run at one load. Times in milliseconds, TBT as the gaps between streamed events.

    A figure without samples is nan, such as TBT if every answer is one event.
    """

    qps_offered: float
    num_requests: int
    num_failed: int
    span_s: float
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tbt_p50_ms: float
    tbt_p99_ms: float
    tbt_max_ms: float
    num_stalls: int  # gaps above the objective (or above 200 ms without one)
    goodput_qps: float
    first_error: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check_measured(self) -> None:
        """Raises MeasurementError if no request streamed anything."""
        if math.isnan(self.ttft_p50_ms):
            why = self.first_error or "the answers were empty"
            raise MeasurementError(
                f"nothing was measured: none of {self.num_requests} requests was answered ({why})"
            )


def load_figures(
    traces: Sequence[Trace], *, tbt_ms: float | None = None, ttft_ms: float | None = None
) -> LoadFigures:
    arrivals = [t.job.arrival_s for t in traces]
    ends = [t.event_times_s[-1] for t in traces if t.event_times_s]
    span_s = max(ends, default=0.0) - min(arrivals, default=0.0)
    gaps = sorted(g for t in traces for g in t.gaps_s)
    ttfts = sorted(t.ttft_s for t in traces if t.ttft_s is not None)
    limit_s = (tbt_ms or 200.0) / 1000
    kept = sum(
        1
        for t in traces
        if t.finished
        and t.ttft_s is not None
        and kept_objectives(
            t.ttft_s,
            max(t.gaps_s, default=0.0),
            ttft_objective_s=None if ttft_ms is None else ttft_ms / 1000,
            tbt_objective_s=None if tbt_ms is None else tbt_ms / 1000,
        )
    )
    window_s = max(arrivals, default=0.0) - min(arrivals, default=0.0)
    return LoadFigures(
        qps_offered=(len(traces) - 1) / window_s if window_s else 0.0,
        num_requests=len(traces),
        num_failed=sum(1 for t in traces if not t.finished),
        span_s=span_s,
        output_tokens_per_s=sum(t.num_tokens for t in traces) / span_s if span_s else 0.0,
        ttft_p50_ms=1000 * quantile(ttfts, 0.5),
        ttft_p99_ms=1000 * quantile(ttfts, 0.99),
        tbt_p50_ms=1000 * quantile(gaps, 0.5),
        tbt_p99_ms=1000 * quantile(gaps, 0.99),
        tbt_max_ms=1000 * gaps[-1] if gaps else math.nan,
        num_stalls=sum(1 for g in gaps if g > limit_s),
        goodput_qps=kept / span_s if span_s else 0.0,
        first_error=next((t.problem for t in traces if t.problem), None),
    )


def exit_if_failed(num_failed: int, first_error: str | None) -> None:
    """Where requests failed, say how many and why the first did, and exit with status 1."""
    if num_failed:
        console.print("[red]requests failed:[/]", num_failed, f"({escape(str(first_error))})")
        raise typer.Exit(1)


def exit_if_any_failed(figures: Iterable[LoadFigures]) -> None:
    """As `exit_if_failed`, of several runs together."""
    failed = [one for one in figures if one.num_failed]
    if failed:
        exit_if_failed(sum(one.num_failed for one in failed), failed[0].first_error)


def rate_together(traces: Sequence[Trace]) -> float | None:
    """Tokens per second while all streams decode: from the latest first token to the earliest last.

    An event counts as the mean tokens of its stream's events: of accepted drafts it has several.
    None if they never all decoded: one ended before another began, or streamed nothing.
    """
    if not all(t.event_times_s for t in traces):
        return None
    begin_s = max(t.event_times_s[0] for t in traces)
    end_s = min(t.event_times_s[-1] for t in traces)
    if end_s <= begin_s:
        return None
    count = 0.0
    for t in traces:
        tokens_per_event = max(1.0, t.num_tokens / len(t.event_times_s))
        count += tokens_per_event * sum(begin_s < at <= end_s for at in t.event_times_s)
    return count / (end_s - begin_s)


def figures_table(figures: Sequence[LoadFigures]) -> Table:
    columns = ("QPS", "TTFT P50", "TTFT P99", "TBT P50", "TBT P99", "TBT max", "tokens/s", "failed")
    rows = []
    for f in figures:
        values = (f.ttft_p50_ms, f.ttft_p99_ms, f.tbt_p50_ms, f.tbt_p99_ms, f.tbt_max_ms,
                  f.output_tokens_per_s, f.num_failed)  # fmt: skip
        rows.append([f"{f.qps_offered:.2f}", *(f"{value:.0f}" for value in values)])
    return table("seen by the client; times in ms", columns, rows, num_words=0)
