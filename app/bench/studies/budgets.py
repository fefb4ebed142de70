"""`legato bench budgets`: what the default gives beside the best fixed budget, on a live engine.

The capacity of `budget: auto` and of fixed token budgets under the same objective: one engine, the
budget switched live between searches, equal arrivals and lengths for all. The default is searched
first and last, which shows how far the machine drifted meanwhile. The simulator makes every search
too, on a machine as fast as it was in the searches before and after (see `validate`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from app.engine_client.client import EngineClient
from app.simulate.hardware.live_log import LiveStep

DEFAULT_CONFIG = Path("configs/serve/bench_135m.yaml")
DEFAULT = "auto"
TYPICAL_PROBES = (5, 9)


@dataclass(frozen=True, slots=True)
class BudgetCapacity:
    """budget: a number of tokens, or "auto". probes: every load that was tried."""

    budget: str
    capacity_qps: float
    simulated_qps: float
    probes: tuple[LoadFigures, ...]


def budget_changes(budget: str, tbt_ms: float) -> dict[str, Any]:
    """Live settings for the search of one budget."""
    num_tokens = None if budget == DEFAULT else int(budget)
    name = DEFAULT if budget == DEFAULT else "fixed"
    return {"budget": name, "token_budget": num_tokens, "tbt_ms": tbt_ms}


async def capacity_of(
    engine: EngineClient,
    budget: str,
    load: Load,
    objective: CapacityObjective,
    tolerance: float,
    chance: random.Random,
) -> tuple[float, list[LoadFigures]]:
    """The capacity and its probes. load: its qps is the first to be tried."""
    await engine.reconfigure(budget_changes(budget, objective.tbt_ms))
    probes: list[LoadFigures] = []
    search = CapacitySearch(load.qps, tolerance)
    while not search.done:
        qps = search.qps
        jobs = dataclasses.replace(load, qps=qps).jobs()
        figures = load_figures(await serve_jobs(engine, jobs, chance), tbt_ms=objective.tbt_ms)
        figures.check_measured()
        probes.append(figures)
        search.judge(objective.passed(figures))
        say_probe(qps, figures, objective, search, load.seconds)
    return search.low_qps, probes


async def search_live(
    args: Mapping[str, Any],
    budgets: Sequence[str],
    load: Load,
    objective: CapacityObjective,
    tolerance: float,
) -> list[tuple[float, list[LoadFigures]]]:
    """Search on the live engine, after two preparatory runs: one executes steps of every size, one
    measures the slowdown."""
    chance = random.Random()  # unseeded: prompts that no engine has seen
    async with local_engine(args) as engine:
        await serve_jobs(engine, [Job(0.0, n, 8) for n in (1, 64, 1000)], chance)
        await engine.reconfigure(budget_changes(budgets[0], objective.tbt_ms))
        probe = dataclasses.replace(load, qps=load.qps / 2, seed=load.seed + 1000)
        await serve_jobs(engine, probe.jobs(), chance)
        found = []
        for budget in budgets:
            console.print(f"budget {budget}")
            found.append(await capacity_of(engine, budget, load, objective, tolerance, chance))
        return found


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
    load: Load,
    objective: CapacityObjective,
    tolerance: float,
) -> list[BudgetCapacity]:
    """Search live, then simulated. Raises MeasurementError if the engine has no cost model."""
    with tempfile.TemporaryDirectory(prefix="legato-budgets-") as folder:
        args = {**args, "telemetry": {"directory": folder, "events": True}, **NO_DRAFTS}
        live = asyncio.run(search_live(args, budgets, load, objective, tolerance))
        config, profile, (_, *steps_of) = read_log(Path(folder))
    found = []
    for number, (budget, (qps, probes)) in enumerate(zip(budgets, live, strict=True)):
        settings = config.with_changes(budget_changes(budget, objective.tbt_ms))
        # The first run only told the slowdown, so what precedes this search's steps is at `number`.
        around = [*steps_of[number], *(steps_of[number + 2] if number + 2 < len(steps_of) else ())]
        simulated = simulated_capacity(settings, profile, around, load, objective, tolerance)
        found.append(BudgetCapacity(budget, qps, simulated, tuple(probes)))
    return found


def command(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="A Serve config.")] = DEFAULT_CONFIG,
    budgets: Annotated[str, typer.Option(help="Fixed budgets.")] = "64,128,256,512",
    tbt_ms: Annotated[float, typer.Option(min=1.0, help="P99 TBT objective.")] = 50.0,
    lengths: LengthsOption = "sharegpt/8",
    guess_qps: Annotated[float, typer.Option(min=0.05)] = 5.0,
    seconds: Annotated[float, typer.Option(min=5.0, help="Arrivals of one probe.")] = 20.0,
    tolerance: Annotated[float, typer.Option(min=0.005, max=0.5)] = 0.07,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Capacity of the default budget and of fixed ones, on one live engine."""
    fixed = budgets.split(",")
    wrong = [b for b in fixed if not (b.isdigit() and int(b))]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]!r} is not a number of tokens", param_hint="--budgets")
    args = read_args(config)
    load = Load(lengths, guess_qps, seconds, seed=seed)
    order = [DEFAULT, *fixed, DEFAULT]
    few_s, many_s = (len(order) * probes * seconds for probes in TYPICAL_PROBES)
    say_duration(few_s, many_s, f"{len(order)} searches by probes of {seconds:g} s")
    found = search_all(args, order, load, CapacityObjective(tbt_ms), tolerance)
    searches = {"searches": [dataclasses.asdict(f) for f in found]}
    publish(make_report(context, searches), as_json, out)
    if not as_json:
        _print(found, tbt_ms)


def _print(found: Sequence[BudgetCapacity], tbt_ms: float) -> None:
    columns = ("budget, tokens", "requests/s", "simulated", "longest TBT below it, ms")
    rows = []
    for one in found:
        passed = [p.tbt_max_ms for p in one.probes if p.tbt_p99_ms <= tbt_ms]
        longest = f"{max(passed):.0f}" if passed else "-"
        figures = (f"{one.capacity_qps:.2f}", f"{one.simulated_qps:.2f}", longest)
        rows.append((one.budget, *figures))
    output.print(table(f"capacity at P99 TBT <= {tbt_ms:g} ms", columns, rows))
