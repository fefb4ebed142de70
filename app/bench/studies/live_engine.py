"""A live engine in this process's Ray cluster, and an open-loop load on it without HTTP."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import typer
import yaml

from actors.scheduling.request import SamplingParams
from app.bench.engine.cpu_usage import wait_until_idle
from app.bench.load.client import Job, Trace, open_loop
from app.engine_client.client import EngineClient, EngineError, GenerationRequest
from app.paths import locate
from app.ray_environment import set_environment

# Of engines that a simulation is held against, which knows of no draft whether it is right.
NO_DRAFTS: Mapping[str, Any] = {"speculation": {"drafter": "none"}}
_ROOT = Path(__file__).resolve().parents[3]
_FIRST_TOKEN = 300  # ids below may mean something to a tokenizer


def read_args(config: Path, *, needs_cost_model: bool = False) -> dict[str, Any]:
    """The settings of a Serve config's application. Raises typer.BadParameter for any other file,
    and where a cost model is needed and the engine will have none: it measures its own where it has
    an objective and none is set."""
    try:
        args = yaml.safe_load(locate(config).read_text())["applications"][0]["args"]
    except (OSError, yaml.YAMLError, KeyError, IndexError, TypeError) as error:
        raise typer.BadParameter(f"{config}: {error!r}", param_hint="--config") from None
    if needs_cost_model and not (
        args.get("slo") or (args.get("scheduling") or {}).get("cost_model")
    ):
        raise typer.BadParameter(
            f"{config}: neither slo.tbt_ms nor scheduling.cost_model is set", param_hint="--config"
        )
    return dict(args)


def draw_prompt(engine: EngineClient, num_tokens: int, chance: random.Random) -> tuple[int, ...]:
    size = engine.card.vocab_size
    return tuple(chance.choices(range(min(_FIRST_TOKEN, size // 2), size), k=num_tokens))


async def serve_jobs(
    engine: EngineClient, jobs: Sequence[Job], chance: random.Random, salt: str | None = None
) -> list[Trace]:
    """Submit the jobs in open loop, with prompts drawn from `chance`. Cached prefixes are shared by
    equal salts."""
    requests = [
        GenerationRequest(
            f"job {number}",
            draw_prompt(engine, job.num_prompt_tokens, chance),
            SamplingParams(max_tokens=job.num_output_tokens),  # greedy, no stop tokens
            cache_salt=salt,
        )
        for number, job in enumerate(jobs)
    ]
    return await open_loop(jobs, lambda n, begin_s: _one(engine, jobs[n], requests[n], begin_s))


async def _one(engine: EngineClient, job: Job, request: GenerationRequest, begin_s: float) -> Trace:
    trace = Trace(job, sent_s=time.perf_counter() - begin_s)
    try:
        async for chunk in engine.generate(request):
            if chunk.tokens:
                trace.event_times_s.append(time.perf_counter() - begin_s)
                trace.num_tokens += len(chunk.tokens)
                trace.tokens += chunk.tokens
    except EngineError as error:
        trace.error = f"{type(error).__name__}: {error}"
    return trace


@contextmanager
def local_cluster() -> Iterator[None]:
    """A Ray cluster of this process's own."""
    set_environment()  # before Ray is imported, which reads it
    import ray

    ray.init(
        address="local",  # never join a cluster that already runs here
        num_cpus=max(os.cpu_count() or 1, 8),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": str(_ROOT)}},
    )
    try:
        yield
    finally:
        ray.shutdown()


@asynccontextmanager
async def local_engine(args: Mapping[str, Any]) -> AsyncGenerator[EngineClient, None]:
    """A live engine of these settings, on a Ray cluster of its own."""
    with local_cluster():
        from app.engine_client.adapters import AdapterEngine
        from app.engine_client.live import LiveEngine
        from app.settings.load import parse, resolve

        # A standby would start, on the same cores, while something is measured.
        settings = parse({**args, "engine": {"standby": False, **args.get("engine", {})}})
        name = Path(settings.model.path).name
        engine = LiveEngine(resolve(settings), name)
        if settings.adapters is not None:
            engine = AdapterEngine(resolve(settings), name, tuple(settings.adapters.paths))
        await engine.start()
        try:
            await asyncio.to_thread(wait_until_idle)
            yield engine
        finally:
            await engine.close()
