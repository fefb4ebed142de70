"""`legato bench routers`: a large fleet under every router, simulated with several seeds.

The runs are those of `app.simulate.studies.routing`. Misses of all seeds are added up, because one
run has too few of them to compare routers by. The seeds of a comparison must not be those with
which a router was tuned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Annotated, Any

import typer

from actors.fleet.routers import ROUTERS
from app.bench.report import make_report, publish
from app.bench.terminal import Json, Out, console, numbers, output, say_duration, table
from app.simulate.studies.routing import TRACES, RoutingRow, study

JUDGED = "slack"  # compared with the best of the other routers
SECONDS_PER_REQUEST = 0.003  # of computing: 30 to 100 s for a run of 64 engines


@dataclass(frozen=True, slots=True)
class RouterFigures:
    """A router under one load, over all seeds.

    missed: share of all requests. least_missed, most_missed: of the seeds. ttft_p99_s, cached: mean
    over the seeds.
    """

    trace: str
    rate: float
    routing: str
    num_seeds: int
    num_requests: int
    missed: float
    least_missed: float
    most_missed: float
    ttft_p99_s: float
    cached: float


def together(rows: Sequence[RoutingRow]) -> list[RouterFigures]:
    """The rows of each load and router as one, in the order of their first row."""
    groups: dict[tuple[str, float, str], list[RoutingRow]] = {}
    for row in rows:
        groups.setdefault((row.trace, row.rate, row.routing), []).append(row)
    found = []
    for (trace, rate, routing), group in groups.items():
        num_requests = sum(row.num_requests for row in group)
        missed = [row.missed for row in group]
        found.append(
            RouterFigures(
                trace,
                rate,
                routing,
                len(group),
                num_requests,
                sum(row.missed * row.num_requests for row in group) / num_requests,
                min(missed),
                max(missed),
                mean(row.ttft_p99_s for row in group),
                mean(row.cached for row in group),
            )
        )
    return found


def fewer_misses(figures: Sequence[RouterFigures]) -> list[dict[str, Any]]:
    """By load: the share of the best other router's misses that `JUDGED` avoids.

    None where that router misses nothing. Loads without `JUDGED` or without others are left out.
    """
    loads: dict[tuple[str, float], dict[str, RouterFigures]] = {}
    for row in figures:
        loads.setdefault((row.trace, row.rate), {})[row.routing] = row
    found: list[dict[str, Any]] = []
    for (trace, rate), by_router in loads.items():
        judged = by_router.pop(JUDGED, None)
        if judged is None or not by_router:
            continue
        best = min(by_router.values(), key=lambda row: row.missed)
        fewer = 1.0 - judged.missed / best.missed if best.missed else None
        found.append({"trace": trace, "rate": rate, "best_other": best.routing, "fewer": fewer})
    return found


def command(
    context: typer.Context,
    engines: Annotated[int, typer.Option(min=2, help="Engines of the fleet.")] = 64,
    seeds: Annotated[str, typer.Option(help="Of the workloads, separated by commas.")] = (
        "10,11,12"
    ),
    routers: Annotated[str, typer.Option(help="Names, by commas; all if empty.")] = "",
    traces: Annotated[str, typer.Option(help=f"Of {', '.join(TRACES)}; all if empty.")] = "",
    seconds: Annotated[float, typer.Option(min=10.0, help="While requests arrive.")] = 80.0,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """TTFT and missed objectives of a large simulated fleet, by router."""
    names = routers.split(",") if routers else list(ROUTERS)
    chosen = traces.split(",") if traces else list(TRACES)
    run_seeds = numbers(seeds, "--seeds", int)
    rate = sum(sum(TRACES[trace].rates) for trace in chosen if trace in TRACES)
    num_requests = rate * engines * seconds * len(names) * len(run_seeds)
    likely_s = SECONDS_PER_REQUEST * num_requests / workers
    say_duration(likely_s / 2, 2 * likely_s, f"{engines} engines, {len(names)} routers")
    rows: list[RoutingRow] = []
    for seed in run_seeds:
        try:
            for row in study(engines, seconds, seed, workers, names, chosen):
                rows.append(row)
                console.print(
                    f"  {row.trace} at {row.rate:g}, seed {seed}, {row.routing}: "
                    f"{row.missed:.2%} missed"
                )
                publish(make_report(context, _results(rows)), False, out)  # what is done so far
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    if as_json:
        publish(make_report(context, _results(rows)), True, None)
    else:
        _show(together(rows))


def _results(rows: Sequence[RoutingRow]) -> dict[str, Any]:
    figures = together(rows)
    return {
        "routers": [asdict(row) for row in figures],
        "fewer_misses": fewer_misses(figures),
        "rows": [row.to_dict() for row in rows],
    }


COLUMNS = (
    "trace", "router", "requests/s and engine", "requests", "missed", "least", "most",
    "P99 TTFT, s", "cached",
)  # fmt: skip


def cells(row: RouterFigures) -> tuple[str, ...]:
    return (
        row.trace,
        row.routing,
        f"{row.rate:g}",
        f"{row.num_requests}",
        f"{row.missed:.2%}",
        f"{row.least_missed:.2%}",
        f"{row.most_missed:.2%}",
        f"{row.ttft_p99_s:.2f}",
        f"{row.cached:.0%}",
    )


def _show(figures: Sequence[RouterFigures]) -> None:
    output.print(table("over all seeds", COLUMNS, [cells(row) for row in figures], num_words=2))
    for found in fewer_misses(figures):
        fewer = "nothing to avoid" if found["fewer"] is None else f"{found['fewer']:.0%} fewer"
        output.print(
            f"{found['trace']} at {found['rate']:g}: {JUDGED} misses {fewer}"
            f" than {found['best_other']}"
        )
