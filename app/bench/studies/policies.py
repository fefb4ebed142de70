"""`legato bench policies`: every policy on one live engine, under one and the same open-loop load.

The engine (scheduler actor, stages, the path of a token back) is built once; policies are switched
live between runs. Arrivals and lengths are equal for all, token ids are new in every run, so that
no prefix cache answers. A few long prompts join the load: they are what makes streams stall.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from actors.scheduling.policies import POLICIES
from app.bench.load.client import Job
from app.bench.load.figures import LoadFigures, load_figures
from app.bench.load.workload import LengthsOption, Load
from app.bench.report import make_report, publish
from app.bench.studies.live_engine import local_engine, read_args, serve_jobs
from app.bench.terminal import Json, Out, console, output, say_duration, table
from app.engine_client.client import EngineClient

DEFAULT_CONFIG = Path("configs/serve/bench_135m.yaml")
# The paper runs the policies that reserve memory with small batches (section 5: 8 to 16).
POLICY_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "orca": {"max_batch": 16},
    "faster_transformer": {"max_batch": 16},
}
COLUMNS = ("TTFT P50", "TTFT P99", "TBT P50", "TBT P99", "max stall", "tokens/s")


async def run_policies(
    engine: EngineClient, policies: Sequence[str], load: Load, *, tbt_ms: float | None = None
) -> dict[str, LoadFigures]:
    """One run per policy, switched live, after a warm-up that touches every size of step."""
    jobs = load.jobs()
    chance = random.Random()  # unseeded: prompts that no engine has seen
    longest = max(job.num_prompt_tokens for job in jobs)
    await serve_jobs(engine, [Job(0.0, n, 8) for n in (1, 64, longest)], chance)
    figures: dict[str, LoadFigures] = {}
    quiet = not console.is_terminal
    with Progress(console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("policies", total=len(policies))
        for policy in policies:
            progress.update(task, description=policy)
            options = dict(POLICY_OPTIONS.get(policy, {}))
            await engine.reconfigure({"policy": policy, "policy_options": options})
            found = load_figures(await serve_jobs(engine, jobs, chance), tbt_ms=tbt_ms)
            found.check_measured()
            figures[policy] = found
            progress.advance(task)
            console.print(
                f"  {policy:18}  P99 TBT {found.tbt_p99_ms:6.0f} ms  "
                f"longest {found.tbt_max_ms:6.0f} ms  median TTFT {found.ttft_p50_ms:6.0f} ms",
                soft_wrap=True,
            )
    return figures


def command(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="A Serve config.")] = DEFAULT_CONFIG,
    policies: Annotated[str, typer.Option(help="Comma-separated names, or all.")] = "all",
    qps: Annotated[float, typer.Option(min=0.01, help="Poisson arrivals per second.")] = 1.2,
    seconds: Annotated[float, typer.Option(min=1.0, help="Arrivals of one policy.")] = 40.0,
    lengths: LengthsOption = "sharegpt/8",
    long_prompts: Annotated[int, typer.Option(min=0, help="Long prompts on top.")] = 3,
    long_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 3000,
    tbt_ms: Annotated[float | None, typer.Option(help="Objective to judge by.")] = None,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Every policy under the same arrivals on one live engine: TTFT, TBT, stalls, tokens/s."""
    names = list(POLICIES) if policies == "all" else policies.split(",")
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise typer.BadParameter(f"unknown {unknown[0]!r}; known: {', '.join(POLICIES)}")
    args = read_args(config)
    load = Load(lengths, qps, seconds, long_prompts, long_tokens, seed)
    span_s = len(names) * seconds
    say_duration(span_s, 1.5 * span_s, f"{len(names)} policies, {seconds:g} s of arrivals each")

    async def run() -> dict[str, LoadFigures]:
        async with local_engine(args) as engine:
            return await run_policies(engine, names, load, tbt_ms=tbt_ms)

    figures = asyncio.run(run())
    publish(make_report(context, policy_results(load, figures)), as_json, out)
    if not as_json:
        columns = ("policy", *COLUMNS, "failed")
        rows = [(name, *_cells(f), str(f.num_failed)) for name, f in figures.items()]
        output.print(table("one engine, the same arrivals; times in ms", columns, rows))
    if failed := {name: f.first_error for name, f in figures.items() if f.num_failed}:
        console.print(f"[red]requests failed:[/] {failed}")
        raise typer.Exit(1)


def policy_results(load: Load, figures: Mapping[str, LoadFigures]) -> dict[str, Any]:
    """Totals of the load, and one entry per policy."""
    jobs = load.jobs()
    return {
        "load": {
            "num_requests": len(jobs),
            "prompt_tokens": sum(job.num_prompt_tokens for job in jobs),
            "output_tokens": sum(job.num_output_tokens for job in jobs),
        },
        "policy_options": {name: dict(POLICY_OPTIONS.get(name, {})) for name in figures},
        "policies": {name: f.to_dict() for name, f in figures.items()},
    }


def _cells(r: LoadFigures) -> list[str]:
    values = (r.ttft_p50_ms, r.ttft_p99_ms, r.tbt_p50_ms, r.tbt_p99_ms, r.tbt_max_ms,
              r.output_tokens_per_s)  # fmt: skip
    return [f"{value:.0f}" for value in values]
