"""`legato bench classes`: streams with a tight objective and requests with none, on one server.

Both orders are run: strict streams first and the other class's load later, then the reverse.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from app.bench.load.client import Job, LoadClient, Trace, first_model
from app.bench.load.figures import LoadFigures, exit_if_any_failed, load_figures
from app.bench.load.serve import DEFAULT_URL, ApiKey, Model, Qps, Seconds, Url
from app.bench.load.workload import LengthsOption, Load
from app.bench.report import make_report, publish
from app.bench.terminal import Json, Out, console, output, say_duration, table

ARRIVES_S = 2.0  # start of the second class
TOKENS_PER_S = 50  # of a stream; more than it gets, so that it outlasts the other load


def stream_jobs(streams: int, seconds: float) -> list[Job]:
    """The first class: short prompts, long answers."""
    num_tokens = int(TOKENS_PER_S * (ARRIVES_S + seconds))
    return [Job(0.05 * number, 64, num_tokens) for number in range(streams)]


async def run_together(
    first: LoadClient, streams: Sequence[Job], second: LoadClient, load: Sequence[Job]
) -> tuple[list[Trace], list[Trace]]:
    later = [dataclasses.replace(job, arrival_s=job.arrival_s + ARRIVES_S) for job in load]
    before, after = await asyncio.gather(first.run(streams), second.run(later))
    return before, after


def class_figures(traces: Sequence[Trace], tbt_ms: float | None) -> LoadFigures:
    """Figures of one class. Raises MeasurementError if no request was answered."""
    figures = load_figures(traces, tbt_ms=tbt_ms)
    figures.check_measured()
    return figures


def command(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Model = None,
    strict_ms: Annotated[
        float, typer.Option(min=1.0, help="TBT objective of the strict class.")
    ] = 50.0,
    streams: Annotated[int, typer.Option(min=1, help="Streams of the class that is first.")] = 8,
    qps: Qps = 1.0,
    seconds: Seconds = 15.0,
    lengths: LengthsOption = "sharegpt/8",
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Strict and other requests together, in both orders of arrival."""
    model = model or first_model(url, api_key)
    strict = LoadClient(url, model, extra={"slo": {"tbt_ms": strict_ms}}, api_key=api_key)
    usual = LoadClient(url, model, api_key=api_key)
    load = Load(lengths, qps, seconds, seed=seed).jobs()
    say_duration(2 * seconds, 6 * seconds, "two orders")
    rows: list[tuple[str, str, LoadFigures]] = []
    for order, first, second in (("strict first", strict, usual), ("strict later", usual, strict)):
        with console.status(order):
            traces = asyncio.run(run_together(first, stream_jobs(streams, seconds), second, load))
        for client, of_class in zip((first, second), traces, strict=True):
            name, limit_ms = ("strict", strict_ms) if client is strict else ("others", None)
            rows.append((order, name, class_figures(of_class, limit_ms)))
    figures: dict[str, Any] = {
        "classes": [{"order": o, "class": name, **f.to_dict()} for o, name, f in rows]
    }
    publish(make_report(context, figures, {"model": model}), as_json, out)
    if not as_json:
        _print(rows, strict_ms)
    exit_if_any_failed(figures for *_, figures in rows)


def _print(rows: Sequence[tuple[str, str, LoadFigures]], strict_ms: float) -> None:
    columns = ("order, class", "TBT P50", "P99", "max", "TTFT P50", "tokens/s", "failed")
    lines = []
    for order, name, f in rows:
        values = (f.tbt_p50_ms, f.tbt_p99_ms, f.tbt_max_ms, f.ttft_p50_ms, f.output_tokens_per_s,
                  f.num_failed)  # fmt: skip
        lines.append((f"{order}, {name}", *(f"{value:.0f}" for value in values)))
    output.print(
        table(f"strict: {strict_ms:g} ms; times in ms, seen by the client", columns, lines)
    )
