"""`legato bench shift`: one load whose kind of requests changes while it runs.

No fixed budget suits all phases. Figures cover the requests that arrive in a phase. There is no
pause between phases, so each begins with the requests that the previous one left running.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from app.bench.load.client import Job, LoadClient, Trace, first_model
from app.bench.load.figures import LoadFigures, exit_if_any_failed, load_figures
from app.bench.load.serve import DEFAULT_URL, ApiKey, Model, Seconds, Url
from app.bench.load.workload import Load
from app.bench.report import make_report, publish
from app.bench.terminal import Json, Out, console, output, say_duration, table

CHAT_DOCUMENTS_CHAT = "sharegpt/8@2,arxiv/8@0.5,sharegpt/8@2"


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests of one kind: Poisson arrivals of `load` from begin_s on."""

    load: Load
    begin_s: float

    def jobs(self) -> list[Job]:
        """The load's, without a second that comes after the phase, where it has less than one."""
        end_s = self.begin_s + self.load.seconds
        moved = [
            dataclasses.replace(job, arrival_s=job.arrival_s + self.begin_s)
            for job in self.load.jobs()
        ]
        return [job for job in moved if job.arrival_s < end_s]


def parse_phases(text: str, seconds: float, seed: int = 0) -> list[Phase]:
    """`LENGTHS@QPS` for each phase, separated by commas. Raises typer.BadParameter.

    >>> [(p.load.lengths, p.load.qps, p.begin_s) for p in parse_phases("64x8@2,512x8@0.5", 10.0)]
    [('64x8', 2.0, 0.0), ('512x8', 0.5, 10.0)]
    """
    phases = []
    for number, part in enumerate(text.split(",")):
        lengths, _, rate = part.rpartition("@")
        try:
            qps = float(rate)
        except ValueError:
            qps = 0.0
        if not lengths or not qps > 0.0:
            raise typer.BadParameter(f"{part!r} is no LENGTHS@QPS", param_hint="--phases")
        phases.append(Phase(Load(lengths, qps, seconds, seed=seed + number), number * seconds))
    return phases


def phase_figures(
    traces: Sequence[Trace], phases: Sequence[Phase], tbt_ms: float
) -> list[tuple[LoadFigures, float]]:
    """Figures of each phase, and the share of its gaps within the objective.

    Raises MeasurementError if a phase had no answer."""
    found = []
    for phase in phases:
        end_s = phase.begin_s + phase.load.seconds
        own = [t for t in traces if phase.begin_s <= t.job.arrival_s < end_s]
        figures = load_figures(own, tbt_ms=tbt_ms)
        figures.check_measured()
        gaps_s = [gap_s for t in own for gap_s in t.gaps_s]
        kept = sum(gap_s <= tbt_ms / 1000 for gap_s in gaps_s) / max(len(gaps_s), 1)
        found.append((figures, kept))
    return found


def command(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Model = None,
    phases: Annotated[
        str, typer.Option(help="LENGTHS@QPS of each, comma separated; lengths as in bench serve.")
    ] = CHAT_DOCUMENTS_CHAT,
    seconds: Seconds = 30.0,
    tbt_ms: Annotated[float, typer.Option(min=1.0, help="Objective to judge by.")] = 100.0,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """A load that changes from chat to documents and back: objectives kept in each phase."""
    plan = parse_phases(phases, seconds, seed)
    model = model or first_model(url, api_key)
    say_duration(len(plan) * seconds, 2 * len(plan) * seconds, f"{len(plan)} phases")
    jobs = sorted((job for phase in plan for job in phase.jobs()), key=lambda job: job.arrival_s)
    with console.status(phases):
        traces = asyncio.run(LoadClient(url, model, api_key=api_key).run(jobs))
    found = phase_figures(traces, plan, tbt_ms)
    rows: list[dict[str, Any]] = [
        {"lengths": phase.load.lengths, "gaps_kept_share": kept, **figures.to_dict()}
        for phase, (figures, kept) in zip(plan, found, strict=True)
    ]
    publish(make_report(context, {"phases": rows}, {"model": model}), as_json, out)
    if not as_json:
        _print(plan, found)
    exit_if_any_failed(figures for figures, _ in found)


def _print(plan: Sequence[Phase], found: Sequence[tuple[LoadFigures, float]]) -> None:
    columns = ("phase", "requests", "failed", "TTFT P50", "TBT P99", "TBT max", "gaps kept")
    rows = [
        (
            *(f"{phase.load.lengths}@{phase.load.qps:g}", str(f.num_requests), str(f.num_failed)),
            *(f"{f.ttft_p50_ms:.0f}", f"{f.tbt_p99_ms:.0f}", f"{f.tbt_max_ms:.0f}"),
            f"{kept:.2%}",
        )
        for phase, (f, kept) in zip(plan, found, strict=True)
    ]
    output.print(table("seen by the client; times in ms", columns, rows, num_words=1))
