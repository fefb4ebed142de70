"""`legato bench policies`: every policy on one live engine, under one and the same open-loop load.

The engine (scheduler actor, stages, the path of a token back) is built once; policies are switched
live between runs. Arrivals and lengths are equal for all, token ids are new in every run, so that
no prefix cache answers. A few long prompts join the load: they are what makes streams stall.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from actors.scheduling.policies import POLICIES
from actors.scheduling.request import SamplingParams
from app.bench.engine.overhead import settle
from app.bench.load.client import Job, Trace, jobs_of
from app.bench.load.generator import Json, LengthsOption, Out, lengths_of, publish
from app.bench.load.measure import Report, report
from app.bench.machine import describe
from app.engine.client import EngineClient, EngineError, GenerationRequest
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.requests import generate

_ROOT = Path(__file__).resolve().parents[3]
DEFAULT_CONFIG = Path("configs/serve/bench_135m.yaml")
# The paper runs the policies that reserve memory with small batches (section 5: 8 to 16).
POLICY_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "orca": {"max_batch": 16},
    "faster_transformer": {"max_batch": 16},
}
COLUMNS = ("TTFT P50", "TTFT P99", "TBT P50", "TBT P99", "max stall", "tokens/s")
_FIRST_TOKEN = 300  # ids below may mean something to a tokenizer

_err = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals over `seconds`, and `num_long` prompts of `long_tokens` spread evenly."""

    lengths: str = "sharegpt/8"
    qps: float = 1.2
    seconds: float = 40.0
    num_long: int = 3
    long_tokens: int = 3000
    seed: int = 0

    def jobs(self) -> list[Job]:
        """In order of arrival; equal loads give equal jobs."""
        count = max(2, math.ceil(self.qps * self.seconds))
        workload = generate(poisson(self.qps), lengths_of(self.lengths), count, seed=self.seed)
        jobs = jobs_of(workload)
        gap_s = self.seconds / (self.num_long + 1)
        jobs += [Job((k + 1) * gap_s, self.long_tokens, 8) for k in range(self.num_long)]
        return sorted(jobs, key=lambda job: job.arrival_s)


async def run_jobs(engine: EngineClient, jobs: Sequence[Job], chance: random.Random) -> list[Trace]:
    """Send every job at its time, whatever the earlier ones do; wait for all answers."""
    vocabulary = range(min(_FIRST_TOKEN, engine.card.vocab_size - 1), engine.card.vocab_size)
    prompts = [tuple(chance.choices(vocabulary, k=job.num_prompt_tokens)) for job in jobs]
    begin_s = time.perf_counter()
    tasks = []
    for number, (job, prompt) in enumerate(zip(jobs, prompts, strict=True)):
        delay_s = job.arrival_s - (time.perf_counter() - begin_s)
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        tasks.append(asyncio.create_task(_one(engine, f"job {number}", job, prompt, begin_s)))
    return list(await asyncio.gather(*tasks))


async def _one(
    engine: EngineClient, name: str, job: Job, prompt: tuple[int, ...], begin_s: float
) -> Trace:
    trace = Trace(job, sent_s=time.perf_counter() - begin_s)
    sampling = SamplingParams(max_tokens=job.num_output_tokens)  # greedy, no stop tokens
    try:
        async for chunk in engine.generate(GenerationRequest(name, prompt, sampling)):
            if chunk.tokens:
                trace.event_times_s.append(time.perf_counter() - begin_s)
                trace.num_tokens += len(chunk.tokens)
    except EngineError as error:
        trace.error = f"{type(error).__name__}: {error}"
    return trace


async def compare(
    engine: EngineClient, policies: Sequence[str], load: Load, *, tbt_ms: float | None = None
) -> dict[str, Report]:
    """One run per policy, switched live, after a warm-up that touches every size of step."""
    jobs = load.jobs()
    chance = random.Random()  # unseeded: prompts that no engine has seen
    longest = max(job.num_prompt_tokens for job in jobs)
    await run_jobs(engine, [Job(0.0, n, 8) for n in (1, 64, longest)], chance)
    reports: dict[str, Report] = {}
    with Progress(console=_err, transient=True) as progress:
        task = progress.add_task("policies", total=len(policies))
        for policy in policies:
            progress.update(task, description=policy)
            options = dict(POLICY_OPTIONS.get(policy, {}))
            await engine.reconfigure({"policy": policy, "policy_options": options})
            found = report(await run_jobs(engine, jobs, chance), tbt_ms=tbt_ms)
            reports[policy] = found
            progress.advance(task)
            _err.print(
                f"  {policy:18}  P99 TBT {found.tbt_p99_ms:6.0f} ms  "
                f"longest {found.tbt_max_ms:6.0f} ms  median TTFT {found.ttft_p50_ms:6.0f} ms",
                soft_wrap=True,
            )
    return reports


@asynccontextmanager
async def local_engine(args: Mapping[str, Any]) -> AsyncGenerator[EngineClient, None]:
    """A live engine of these settings, on a Ray cluster of its own."""
    from app.cli.serve import ENVIRONMENT  # read by Ray when it is imported

    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    import ray

    from app.engine.live import LiveEngine
    from app.settings import parse, resolve

    settings = parse(args)
    ray.init(
        num_cpus=max(os.cpu_count() or 1, 4),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": str(_ROOT)}},
    )
    try:
        engine = LiveEngine(resolve(settings), Path(settings.model.path).name)
        await engine.start()
        try:
            await asyncio.to_thread(settle)
            yield engine
        finally:
            await engine.close()
    finally:
        ray.shutdown()


def bench_policies(
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
    args = yaml.safe_load(config.read_text())["applications"][0]["args"]
    load = Load(lengths, qps, seconds, long_prompts, long_tokens, seed)

    async def run() -> dict[str, Report]:
        async with local_engine(args) as engine:
            return await compare(engine, names, load, tbt_ms=tbt_ms)

    reports = asyncio.run(run())
    publish(result(config, load, reports), as_json, out)
    if not as_json:
        _err.print(_table(reports))
        typer.echo(markdown(reports))


def result(config: Path, load: Load, reports: Mapping[str, Report]) -> dict[str, Any]:
    """The JSON report: machine, config, load, and one entry per policy."""
    jobs = load.jobs()
    return {
        "machine": describe(),
        "config": str(config),
        "load": {
            "lengths": load.lengths,
            "qps": load.qps,
            "seconds": load.seconds,
            "num_requests": len(jobs),
            "num_long_prompts": load.num_long,
            "long_prompt_tokens": load.long_tokens,
            "prompt_tokens": sum(job.num_prompt_tokens for job in jobs),
            "output_tokens": sum(job.num_output_tokens for job in jobs),
            "seed": load.seed,
        },
        "policy_options": {name: dict(POLICY_OPTIONS.get(name, {})) for name in reports},
        "policies": {name: r.to_dict() for name, r in reports.items()},
    }


def _cells(r: Report) -> list[str]:
    values = (r.ttft_p50_ms, r.ttft_p99_ms, r.tbt_p50_ms, r.tbt_p99_ms, r.tbt_max_ms,
              r.output_tokens_per_s)  # fmt: skip
    return [f"{value:.0f}" for value in values]


def markdown(reports: Mapping[str, Report]) -> str:
    """The table of the documentation; times in milliseconds."""
    lines = ["| policy | " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * len(COLUMNS) + "|"]
    lines += [f"| `{name}` | " + " | ".join(_cells(r)) + " |" for name, r in reports.items()]
    return "\n".join(lines)


def _table(reports: Mapping[str, Report]) -> Table:
    table = Table(title="one engine, the same arrivals; times in ms", title_justify="left")
    for column in ("policy", *COLUMNS, "failed"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, r in reports.items():
        table.add_row(name, *_cells(r), str(r.num_failed))
    return table


def register(bench: typer.Typer) -> None:
    bench.command("policies")(bench_policies)
