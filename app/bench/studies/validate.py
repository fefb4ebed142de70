"""`legato bench validate`: the simulator against this machine, on the very same arrivals.

A live engine serves every load under every policy, with its event log on. Then each run is
simulated, and its figures are put beside the live ones. What the simulation is told of the
machine's slowdown (step times over their profile, and the pauses between steps) comes from the
policy's other runs of the same round, never from the run it is held against; with a single load,
from a first run of other requests. The same log says how far the cost model is from steps that its
fit never saw, and repeated rounds say how far the machine is from itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from actors.engine.event_recorder import read_events
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.scheduling.event_log import config_of
from app.bench.load.client import Job, Trace
from app.bench.load.figures import load_figures
from app.bench.load.workload import LengthsOption, Load
from app.bench.report import MeasurementError, make_report, publish
from app.bench.studies.live_engine import NO_DRAFTS, local_engine, read_args, serve_jobs
from app.bench.studies.policies import POLICY_OPTIONS
from app.bench.terminal import Json, Out, console, numbers, output, say_duration, table
from app.simulate.hardware.live_log import LiveStep, Slowdown, runs, slowdown
from app.simulate.run.recorded import measured_deployment
from app.simulate.run.simulation import simulate
from app.simulate.workload.requests import Workload

DEFAULT_CONFIG = Path("configs/serve/bench_135m.yaml")
FIGURES = ("ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99")


@dataclass(frozen=True, slots=True)
class ValidationRun:
    """One load under one policy. Figures in milliseconds, by the names of `FIGURES`."""

    policy: str
    qps: float
    repeat: int
    live: dict[str, float]
    simulated: dict[str, float]
    steps: Slowdown  # of this run, against the profile

    @property
    def differences(self) -> dict[str, float]:
        """Relative differences, simulated / live - 1, by figure."""
        return {name: self.simulated[name] / self.live[name] - 1.0 for name in FIGURES}

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "differences": self.differences}


def simulated_figures(
    jobs: Sequence[Job],
    config: SchedulerConfig,
    profile: CostModel,
    calibration: Sequence[LiveStep],
    seed: int = 0,
) -> dict[str, float]:
    """The same arrivals through the simulator: the machine as it is today, a core that believes
    the profile."""
    workload = Workload(
        np.array([job.arrival_s for job in jobs]),
        np.array([job.num_prompt_tokens for job in jobs]),
        np.array([job.num_output_tokens for job in jobs]),
    )
    # Simulated prompts are blank, live ones new: neither finds a prefix.
    config = dataclasses.replace(config, prefix_cache=False)
    deployment = measured_deployment(config, profile, calibration)
    summary = simulate(workload, deployment, seed=seed).summary()
    return {name: 1000.0 * getattr(summary, name) for name in FIGURES}


def live_figures(traces: Sequence[Trace]) -> dict[str, float]:
    """Figures of the live run. Raises MeasurementError if a request failed."""
    seen = load_figures(traces)
    if seen.num_failed:
        raise MeasurementError(f"{seen.num_failed} requests failed: {seen.first_error}")
    return {name: getattr(seen, f"{name}_ms") for name in FIGURES}


def policy_changes(policy: str) -> dict[str, Any]:
    return {"policy": policy, "policy_options": dict(POLICY_OPTIONS.get(policy, {}))}


async def serve_all(
    args: Mapping[str, Any], order: Sequence[tuple[str, Load]]
) -> list[list[Trace]]:
    """The traces of every (policy, load) of `order`, on one live engine."""
    chance = random.Random()  # unseeded: prompts that no engine has seen
    async with local_engine(args) as engine:
        # Pages, buffers and sizes of step that nothing has touched yet.
        await serve_jobs(engine, [Job(0.0, n, 8) for n in (1, 64, 1000)], chance)
        traces = []
        for policy, load in order:
            console.print(f"  live: {policy}, {load.qps:g} requests/s")
            await engine.reconfigure(policy_changes(policy))
            traces.append(await serve_jobs(engine, load.jobs(), chance))
    return traces


def read_log(folder: Path) -> tuple[SchedulerConfig, CostModel, list[list[LiveStep]]]:
    """The engine's settings, its profile, and its steps, a list for every live change.

    Raises MeasurementError if the deployment has no cost model.
    """
    logs = sorted(folder.rglob("events-*-0001.parquet"))
    rows = [row for log in logs for row in read_events(log)]
    config = config_of(rows[0])
    if config.cost_model is None:
        raise MeasurementError("the engine has no cost model: set slo.tbt_ms")
    return config, CostModel.from_dict(config.cost_model), runs(rows)


def validate(
    args: dict[str, Any], policies: Sequence[str], loads: Sequence[Load], repeats: int = 1
) -> tuple[Slowdown, list[ValidationRun]]:
    """Serve live, then simulate. Raises MeasurementError if the deployment has no cost model."""
    with tempfile.TemporaryDirectory(prefix="legato-validate-") as folder:
        args = {**args, "telemetry": {"directory": folder, "events": True}, **NO_DRAFTS}
        order = [(p, load) for _ in range(repeats) for p in policies for load in loads]
        warm_up = dataclasses.replace(loads[-1], seed=loads[-1].seed + 1000)
        warm_ups = [(policy, warm_up) for policy in policies]
        traces = asyncio.run(serve_all(args, [*warm_ups, *order]))
        config, profile, (_, *steps_of) = read_log(Path(folder))
    first, steps_of = dict(zip(policies, steps_of, strict=False)), steps_of[len(policies) :]
    found = []
    for number, (policy, load) in enumerate(order):
        # A block of `order` is one policy's runs of one round.
        block_begin = number - number % len(loads)
        block = range(block_begin, block_begin + len(loads))
        others = [step for other in block if other != number for step in steps_of[other]]
        found.append(
            ValidationRun(
                policy,
                load.qps,
                number // (len(policies) * len(loads)),
                live_figures(traces[len(policies) + number]),
                simulated_figures(
                    load.jobs(),
                    config.with_changes(policy_changes(policy)),
                    profile,
                    others or first[policy],
                    seed=number,
                ),
                slowdown(steps_of[number], profile),
            )
        )
    return slowdown(first[policies[0]], profile), found


def command(
    context: typer.Context,
    config: Annotated[
        Path, typer.Option(help="A Serve config with a TBT objective or a cost model.")
    ] = DEFAULT_CONFIG,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Pipeline stages; the config's if not given.")
    ] = None,
    policies: Annotated[str, typer.Option(help="Comma-separated names.")] = "sarathi,vllm",
    qps: Annotated[str, typer.Option(help="Comma-separated loads.")] = "1,2,3",
    seconds: Annotated[float, typer.Option(min=1.0, help="Arrivals of one run.")] = 60.0,
    lengths: LengthsOption = "sharegpt/8",
    repeats: Annotated[int, typer.Option(min=1, help="Whole rounds, to see the spread.")] = 1,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """The simulator against this machine: same arrivals, P50 and P99 TTFT and TBT of both."""
    args = read_args(config, needs_cost_model=True)
    if stages is not None:
        args["parallel"] = {**(args.get("parallel") or {}), "pipeline_stages": stages}
    loads = [Load(lengths, rate, seconds, seed=seed) for rate in numbers(qps, "--qps", float)]
    names = policies.split(",")
    num_runs = len(names) * (repeats * len(loads) + 1)  # and a warm-up each
    what = f"{num_runs} live runs of {seconds:g} s, then as many simulated"
    say_duration(num_runs * seconds, 1.5 * num_runs * seconds, what)
    today, found = validate(args, names, loads, repeats)
    results = {
        "slowdown": dataclasses.asdict(today),
        "drift_between_rounds": drifts(found),
        "runs": [run.to_dict() for run in found],
    }
    publish(make_report(context, results), as_json, out)
    if not as_json:
        _print(today, found)


def drifts(found: Sequence[ValidationRun]) -> dict[str, float]:
    """Median difference of each live figure between the first round and later ones."""
    first = {(run.policy, run.qps): run.live for run in found if run.repeat == 0}
    later = [run for run in found if run.repeat]
    return {
        name: median(abs(r.live[name] / first[r.policy, r.qps][name] - 1.0) for r in later)
        for name in FIGURES
        if later
    }


def _print(today: Slowdown, found: Sequence[ValidationRun]) -> None:
    columns = ("policy", "QPS", "TTFT P50", "TTFT P99", "TBT P50", "TBT P99", "step error P50, %",
               "P95, %")  # fmt: skip
    rows = []
    for run in found:
        cells = [
            f"{run.live[n]:.0f} / {run.simulated[n]:.0f} ({100 * run.differences[n]:+.0f} %)"
            for n in FIGURES
        ]
        errors = (f"{100 * run.steps.median_error:.1f}", f"{100 * run.steps.p95_error:.1f}")
        rows.append((run.policy, f"{run.qps:g}", *cells, *errors))
    output.print(table("live / simulated, ms (difference)", columns, rows))
    if drift := drifts(found):
        worst = ", ".join(f"{name} {100 * share:.0f} %" for name, share in drift.items())
        output.print(f"the machine against itself, median difference between rounds: {worst}")
    output.print(
        f"today: steps {today.ratio:.2f} x the profile, spread {100 * today.sigma:.0f} %, "
        f"{1e3 * today.gap_s:.2f} ms between steps, {1e3 * today.answer_s:.2f} ms to the core"
    )
