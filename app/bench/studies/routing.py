"""`legato bench routing`: conversations over live engines, under one router after the other.

Three engines of this process's own Ray cluster, and a front without HTTP before them, a new one
for each router. Every router gets the same conversations at the same times, with tokens of its own,
so that no run finds what another has left in the prefix caches. A turn repeats all that was said
before, which is in one engine's cache: what it finds there need not be computed.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from actors.fleet.routers import ROUTERS, build_router
from actors.scheduling.request import SamplingParams
from app.bench.report import make_report, publish
from app.bench.studies.live_engine import local_cluster, read_args
from app.bench.terminal import Json, Out, console, output, say_duration, table
from app.engine_client.client import EngineClient, EngineError, GenerationRequest
from app.telemetry.definitions import quantile

_TOKENS = range(300, 4000)  # ids below may mean something to a tokenizer
_START_S = 90.0  # of three engines, about


@dataclass(frozen=True, slots=True)
class Talk:
    """One conversation: when it begins, its opening, and what each turn adds and gets."""

    begin_s: float
    num_opening: int
    num_turns: int
    num_added: int = 48
    num_answered: int = 24


@dataclass(frozen=True, slots=True)
class Turn:
    """Measurements of one turn. ttft_s: None if it failed."""

    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_s: float | None


def command(
    context: typer.Context,
    routers: Annotated[
        str, typer.Option(help="Names, by commas; the first is compared with the rest.")
    ] = "slack,round_robin,least_loaded",
    num_engines: Annotated[int, typer.Option(min=2, max=8, help="Live engines.")] = 3,
    qps: Annotated[float, typer.Option(min=0.01, help="Conversations a second.")] = 0.6,
    seconds: Annotated[float, typer.Option(min=5.0, help="While they begin.")] = 40.0,
    think_s: Annotated[float, typer.Option(min=0.0, help="Between answer and next turn.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Of the conversations.")] = 0,
    config: Annotated[Path, typer.Option(help="Settings of each engine.")] = Path(
        "configs/serve/two_replicas.yaml"
    ),
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Time to first token and prefix hits of live engines, by router."""
    names = routers.split(",")
    for name in names:
        if name not in ROUTERS:
            raise typer.BadParameter(f"{name!r}: one of {', '.join(ROUTERS)}")
    lasts_s = _START_S + len(names) * (seconds + 25.0)
    say_duration(lasts_s, 1.5 * lasts_s, f"{num_engines} engines under {len(names)} routers")
    talks = draw_talks(qps, seconds, seed)
    args = {**read_args(config), "parallel": {"threads_per_rank": 1}}
    found = asyncio.run(_all(args, names, num_engines, talks, think_s, seed))
    figures = {name: figures_of(turns) for name, turns in found.items()}
    publish(make_report(context, {"routers": figures}), as_json, out)
    if not as_json:
        rows = [
            (
                name,
                f"{row['num_turns']}",
                f"{row['num_failed']}",
                f"{row['hit_share']:.1%}",
                f"{row['ttft_p50_ms']:.0f}",
                f"{row['ttft_mean_ms']:.0f}",
                f"{row['ttft_p99_ms']:.0f}",
            )
            for name, row in figures.items()
        ]
        columns = ("router", "turns", "failed", "found in cache", "TTFT P50, ms", "mean", "P99")
        output.print(table(f"{num_engines} live engines", columns, rows))


def draw_talks(qps: float, seconds: float, seed: int) -> list[Talk]:
    """Poisson arrivals; openings of 256 to 1500 tokens, three to five turns."""
    chance = random.Random(seed)
    talks = []
    begin_s = chance.expovariate(qps)
    while begin_s < seconds:
        talks.append(Talk(begin_s, chance.randint(256, 1500), chance.randint(3, 5)))
        begin_s += chance.expovariate(qps)
    return talks


def figures_of(turns: Sequence[Turn]) -> dict[str, float]:
    """hit_share: of all prompt tokens, those found in a prefix cache."""
    ttfts_s = sorted(turn.ttft_s for turn in turns if turn.ttft_s is not None)
    num_tokens = sum(turn.num_prompt_tokens for turn in turns)
    return {
        "num_turns": len(turns),
        "num_failed": len(turns) - len(ttfts_s),
        "hit_share": sum(turn.num_cached_tokens for turn in turns) / max(1, num_tokens),
        "ttft_p50_ms": 1000 * median(ttfts_s) if ttfts_s else 0.0,
        "ttft_mean_ms": 1000 * sum(ttfts_s) / max(1, len(ttfts_s)),
        "ttft_p99_ms": 1000 * quantile(ttfts_s, 0.99) if ttfts_s else 0.0,
    }


async def _all(
    args: Mapping[str, Any],
    names: Sequence[str],
    num_engines: int,
    talks: Sequence[Talk],
    think_s: float,
    seed: int,
) -> dict[str, list[Turn]]:
    with local_cluster():
        async with _engines(args, num_engines) as new_front:
            found = {}
            for name in names:
                console.print(f"  live: {name}")
                front = await new_front(name)
                try:
                    chance = random.Random(f"{seed} {name}")
                    found[name] = await converse(front, talks, think_s, chance)
                finally:
                    await front.close()
            return found


@asynccontextmanager
async def _engines(args: Mapping[str, Any], count: int) -> AsyncGenerator[Any, None]:
    """Start that many engines; yields a factory of fronts that know them all."""
    from actors.transport.node_directory import this_node
    from app.engine_client.live import LiveEngine  # here, as they import Ray
    from app.fleet.client import FleetClient
    from app.fleet.finder import Finder
    from app.fleet.registry import Member, Registry
    from app.settings.load import parse, resolve

    settings = parse(args)
    registry = Registry(f"bench-{secrets.token_hex(4)}")
    engines = []
    try:
        for number in range(count):
            member = Member(registry, f"engine-{number}", tcp=False)
            engine = LiveEngine(resolve(settings), "bench", membership=member)
            engines.append(engine)
            await engine.start()

        async def new_front(router: str) -> FleetClient:
            path = str(settings.model.path)
            front = FleetClient(Finder(registry, this_node()), "bench", path, build_router(router))
            await front.start()
            return front

        yield new_front
    finally:
        for engine in engines:
            await engine.close()


async def converse(
    front: EngineClient, talks: Sequence[Talk], think_s: float, chance: random.Random
) -> list[Turn]:
    """Start every conversation at its time; its turns run in sequence."""
    seeds = [chance.random() for _ in talks]
    begin_s = time.perf_counter()

    async def one(number: int, talk: Talk) -> list[Turn]:
        own = random.Random(seeds[number])
        await asyncio.sleep(max(0.0, talk.begin_s - (time.perf_counter() - begin_s)))
        said = own.choices(_TOKENS, k=talk.num_opening)
        turns = []
        for turn in range(talk.num_turns):
            if turn:
                await asyncio.sleep(think_s)
                said += own.choices(_TOKENS, k=talk.num_added)
            seen, answer = await _turn(front, f"{number}-{turn}", said, talk.num_answered)
            turns.append(seen)
            said += answer
        return turns

    found = await asyncio.gather(*[one(number, talk) for number, talk in enumerate(talks)])
    return [turn for turns in found for turn in turns]


async def _turn(
    front: EngineClient, name: str, prompt: Sequence[int], num_tokens: int
) -> tuple[Turn, list[int]]:
    sent_s = time.perf_counter()
    ttft_s: float | None = None
    num_cached = 0
    answer: list[int] = []
    request = GenerationRequest(name, tuple(prompt), SamplingParams(max_tokens=num_tokens))
    try:
        async for chunk in front.generate(request):
            if ttft_s is None:
                ttft_s, num_cached = time.perf_counter() - sent_s, chunk.num_cached_tokens
            answer += chunk.tokens
    except EngineError:
        ttft_s = None
    return Turn(len(prompt), num_cached, ttft_s), answer
