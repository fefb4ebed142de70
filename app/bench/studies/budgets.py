"""`legato bench budgets`: what the default gives beside the best fixed budget, on a live engine.

The capacity of `budget: auto` and of fixed token budgets under the same objective, on one engine.
In every round all are searched side by side: the budget is switched live before every load, so that
a slow minute of the machine meets all of them, with equal arrivals and lengths. One load of 15 s
passes or fails by its slowest step or two; rounds with other arrivals show how far that matters.
The simulator makes every search too, on a machine as fast as it was under the other budgets of the
round (see `validate`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from app.bench.load.capacity import (
    CapacityObjective,
    CapacitySearch,
    say_probe,
    search_capacity,
)
from app.bench.load.client import Job
from app.bench.load.figures import LoadFigures, load_figures
from app.bench.load.workload import LengthsOption, Load
from app.bench.report import make_report, publish
from app.bench.studies.live_engine import NO_DRAFTS, local_engine, read_args, serve_jobs
from app.bench.studies.validate import read_log, simulated_figures
from app.bench.terminal import Json, Out, console, output, say_duration, table
from app.simulate.hardware.live_log import LiveStep

DEFAULT_CONFIG = Path("configs/serve/bench_135m.yaml")
DEFAULT = "auto"
TYPICAL_PROBES = (5, 9)


@dataclass(frozen=True, slots=True)
class BudgetCapacity:
    """budget: a number of tokens, or "auto". The capacities: one per round. probes: every load that
    was tried, of all rounds."""

    budget: str
    capacities_qps: tuple[float, ...]
    simulated_qps: tuple[float, ...]
    probes: tuple[LoadFigures, ...]


@dataclass(slots=True)
class BudgetSearch:
    """One budget's search of one round. runs: the numbers of its loads on the engine."""

    budget: str
    search: CapacitySearch
    probes: list[LoadFigures] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)


def budget_changes(budget: str, tbt_ms: float) -> dict[str, Any]:
    """Live settings for the search of one budget."""
    num_tokens = None if budget == DEFAULT else int(budget)
    name = DEFAULT if budget == DEFAULT else "fixed"
    return {"budget": name, "token_budget": num_tokens, "tbt_ms": tbt_ms}


async def search_round(
    serve: Callable[[str, Load], Awaitable[LoadFigures]],
    searches: Sequence[BudgetSearch],
    load: Load,
    objective: CapacityObjective,
    first_run: int,
) -> int:
    """Search all budgets, a load of each in turn. Returns the number of the next run.

    serve: serves a load under a budget. first_run: the number of the first one.
    """
    run = first_run
    while left := [one for one in searches if not one.search.done]:
        for one in left:
            qps = one.search.qps
            figures = await serve(one.budget, dataclasses.replace(load, qps=qps))
            figures.check_measured()
            one.probes.append(figures)
            one.runs.append(run)
            run += 1
            one.search.judge(objective.passed(figures))
            console.print(f"{one.budget:>6}", end="")
            say_probe(qps, figures, objective, one.search, len(left) * load.seconds)
    return run


async def search_live(
    args: Mapping[str, Any],
    rounds: Sequence[Sequence[BudgetSearch]],
    loads: Sequence[Load],
    objective: CapacityObjective,
) -> None:
    """Make the searches of every round, with its load, on one live engine.

    Before, steps of every size are executed, and a run measures the slowdown."""
    chance = random.Random()  # unseeded: prompts that no engine has seen
    async with local_engine(args) as engine:

        async def serve(budget: str, load: Load) -> LoadFigures:
            await engine.reconfigure(budget_changes(budget, objective.tbt_ms))
            traces = await serve_jobs(engine, load.jobs(), chance)
            return load_figures(traces, tbt_ms=objective.tbt_ms)

        await serve_jobs(engine, [Job(0.0, n, 8) for n in (1, 64, 1000)], chance)
        first = loads[0]
        warm_up = dataclasses.replace(first, qps=first.qps / 2, seed=first.seed + 1000)
        await serve(rounds[0][0].budget, warm_up)
        run = 1
        for number, (searches, load) in enumerate(zip(rounds, loads, strict=True)):
            console.print(f"round {number + 1} of {len(rounds)}")
            run = await search_round(serve, searches, load, objective, run)


def simulated_capacity(
    config: SchedulerConfig,
    profile: CostModel,
    calibration: Sequence[LiveStep],
    load: Load,
    objective: CapacityObjective,
    tolerance: float,
) -> float:
    def passes(qps: float) -> bool:
        jobs = dataclasses.replace(load, qps=qps).jobs()
        seen = simulated_figures(jobs, config, profile, calibration)
        return objective.hold(seen["tbt_p99"], seen["ttft_p50"])

    return search_capacity(CapacitySearch(load.qps, tolerance), passes)


def search_all(
    args: Mapping[str, Any],
    budgets: Sequence[str],
    loads: Sequence[Load],
    objective: CapacityObjective,
    tolerance: float,
) -> list[BudgetCapacity]:
    """Search live, then simulated; a load for every round, whose qps is the first to be tried.

    Raises MeasurementError if the engine has no cost model."""
    rounds = [
        [BudgetSearch(b, CapacitySearch(load.qps, tolerance)) for b in budgets] for load in loads
    ]
    with tempfile.TemporaryDirectory(prefix="legato-budgets-") as folder:
        args = {**args, "telemetry": {"directory": folder, "events": True}, **NO_DRAFTS}
        asyncio.run(search_live(args, rounds, loads, objective))
        config, profile, (_, *steps_of) = read_log(Path(folder))
    simulated: dict[str, list[float]] = {budget: [] for budget in budgets}
    for searches, load in zip(rounds, loads, strict=True):
        for one in searches:
            others = [
                s for other in searches if other is not one for n in other.runs for s in steps_of[n]
            ]
            settings = config.with_changes(budget_changes(one.budget, objective.tbt_ms))
            simulated[one.budget].append(
                simulated_capacity(settings, profile, others, load, objective, tolerance)
            )
    return [
        BudgetCapacity(
            budget,
            tuple(searches[n].search.low_qps for searches in rounds),
            tuple(simulated[budget]),
            tuple(figures for searches in rounds for figures in searches[n].probes),
        )
        for n, budget in enumerate(budgets)
    ]


def command(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="A Serve config.")] = DEFAULT_CONFIG,
    budgets: Annotated[str, typer.Option(help="Fixed budgets.")] = "64,128,256,512",
    tbt_ms: Annotated[float, typer.Option(min=1.0, help="P99 TBT objective.")] = 50.0,
    lengths: LengthsOption = "sharegpt/8",
    guess_qps: Annotated[float, typer.Option(min=0.05)] = 5.0,
    seconds: Annotated[float, typer.Option(min=5.0, help="Arrivals of one probe.")] = 20.0,
    tolerance: Annotated[float, typer.Option(min=0.005, max=0.5)] = 0.07,
    rounds: Annotated[int, typer.Option(min=1, help="Searches of each, by other arrivals.")] = 1,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Capacity of the default budget and of fixed ones, side by side on one live engine."""
    fixed = budgets.split(",")
    wrong = [b for b in fixed if not (b.isdigit() and int(b))]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]!r} is not a number of tokens", param_hint="--budgets")
    args = read_args(config)
    loads = [Load(lengths, guess_qps, seconds, seed=seed + n) for n in range(rounds)]
    order = [DEFAULT, *fixed]
    num_searches = rounds * len(order)
    few_s, many_s = (num_searches * probes * seconds for probes in TYPICAL_PROBES)
    say_duration(few_s, many_s, f"{num_searches} searches by probes of {seconds:g} s")
    found = search_all(args, order, loads, CapacityObjective(tbt_ms), tolerance)
    searches = {"searches": [dataclasses.asdict(f) for f in found]}
    publish(make_report(context, searches), as_json, out)
    if not as_json:
        _print(found, tbt_ms)


def _print(found: Sequence[BudgetCapacity], tbt_ms: float) -> None:
    columns = (
        "budget, tokens",
        "requests/s",
        "lowest",
        "highest",
        "simulated",
        "longest TBT below it, ms",
    )
    rows = []
    for one in found:
        passed = [p.tbt_max_ms for p in one.probes if p.tbt_p99_ms <= tbt_ms]
        longest = f"{max(passed):.0f}" if passed else "-"
        live = one.capacities_qps
        figures = (median(live), min(live), max(live), median(one.simulated_qps))
        rows.append((one.budget, *(f"{qps:.2f}" for qps in figures), longest))
    output.print(table(f"capacity at P99 TBT <= {tbt_ms:g} ms", columns, rows))
