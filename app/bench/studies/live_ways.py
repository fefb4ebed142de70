"""`legato bench live-ways`: colocated, split and flexible engines, live and simulated.

Two live engines of one thread each serve every load in every way: two that do all; one for prompts
and one for streams; one for prompts and one for both. Three engines run throughout, of which each
way uses two. Then the same arrivals go through the simulator, with the cost model that the engines
measured at their start. What it is told of the machine (step times over their model, the pauses
between steps, how fast KV moves) comes from short runs of other requests before, never from a run
that it is held against.

Prompts are the same in every way, and so must the tokens be (`tokens_equal`).

Asked is whether both put colocated and split engines in the same order, figure by figure: values
nearer to each other than `EVEN` are in no order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from actors.fleet.snapshot import Role
from actors.scheduling.cost.model import CostModel
from actors.scheduling.event_log import config_of
from app.bench.load.client import Job, Trace
from app.bench.load.workload import Load
from app.bench.report import MeasurementError, make_report, publish
from app.bench.studies.kv_log import measured_link, read_engine, read_rows
from app.bench.studies.live_engine import serve_jobs
from app.bench.studies.live_fleet import LiveFleet, args_of, block_bytes, live_fleet, router_of
from app.bench.studies.ways_compared import (
    EVEN,
    FIGURES,
    Machine,
    deployment_of,
    live_figures,
    orders,
    simulated_figures,
)
from app.bench.terminal import Json, Out, console, output, say_duration, table
from app.simulate.hardware.live_log import runs, slowdown

ENGINES = {"prefill": Role.PREFILL, "one": Role.BOTH, "two": Role.BOTH}
WAYS = {
    "colocated": ("one", "two"),
    "split": ("prefill", "one"),  # whose second engine only gets what was begun elsewhere
    "flexible": ("prefill", "one"),
}
LOADS = "chat=128x64@4,documents=1500x16@1.5,outputs=64x160@1.5,mixed=sharegpt/4@3"
_WARM_LENGTHS = (1, 64, 512, 1500)  # of prompts
_WARM_S = 6.0  # of each load in each way, before what is measured

Traces = dict[tuple[str, str], list[list[Trace]]]  # by load and way, of each round


@dataclass(frozen=True, slots=True)
class NamedLoad:
    name: str
    load: Load

    @classmethod
    def parse(cls, text: str, seconds: float, seed: int) -> NamedLoad:
        """NAME=LENGTHS@QPS."""
        name, _, rest = text.partition("=")
        lengths, _, qps = rest.rpartition("@")
        try:
            return cls(name, Load(lengths, float(qps), seconds, seed=seed))
        except ValueError:
            raise typer.BadParameter(f"{text!r}: use NAME=LENGTHS@QPS") from None

    @property
    def warm_up(self) -> Load:
        return replace(self.load, seconds=_WARM_S, seed=self.load.seed + 1000)


@dataclass(frozen=True, slots=True)
class Warm:
    """A run that is not measured: which way, and when, by `time.monotonic`."""

    way: str
    begin_s: float
    end_s: float


async def serve_all(
    fleet: LiveFleet, loads: Sequence[NamedLoad], repeats: int
) -> tuple[list[Warm], Traces]:
    """The warm-ups, and what was measured."""
    chance = random.Random()  # unseeded: prompts that no engine has seen
    warm: list[Warm] = []

    async def serve(way: str, jobs: Sequence[Job], seed: int) -> list[Trace]:
        async with fleet.front(router_of(way), WAYS[way]) as front:
            return await serve_jobs(front, jobs, random.Random(seed), salt=f"{way} {seed}")

    for way in WAYS:
        # Pages, buffers and sizes of step that nothing has touched yet.
        await serve(way, [Job(0.0, n, 8) for n in _WARM_LENGTHS], chance.getrandbits(32))
        console.print(f"  warm-up: {way}")
        begin_s = time.monotonic()
        for named in loads:
            await serve(way, named.warm_up.jobs(), chance.getrandbits(32))
        warm.append(Warm(way, begin_s, time.monotonic()))
    traces: Traces = {}
    for _, named in itertools.product(range(repeats), loads):
        seed = chance.getrandbits(32)
        for way in WAYS:
            console.print(f"  live: {named.name}, {named.load.qps:g} requests/s, {way}")
            found = await serve(way, named.load.jobs(), seed)
            traces.setdefault((named.name, way), []).append(found)
    return warm, traces


def tokens_equal(traces: Traces, load: str) -> bool:
    """Whether every way has given the tokens of the others to every request of this load."""
    ways = [[[trace.tokens for trace in found] for found in traces[load, way]] for way in WAYS]
    return all(tokens == ways[0] for tokens in ways)


def read_machine(folder: Path, warm: Sequence[Warm], args: Mapping[str, Any]) -> Machine:
    """Raises MeasurementError where the engines have no cost model."""
    end_s = max(part.end_s for part in warm)
    rows = {name: read_rows(folder / name) for name in ENGINES}
    early = {name: [r for r in found if r["now_s"] <= end_s] for name, found in rows.items()}
    steps = {name: list(itertools.chain(*runs(found))) for name, found in early.items()}
    config = config_of(early["one"][0])
    if config.cost_model is None:
        raise MeasurementError("the engines have not measured a cost model at their start")
    size = block_bytes(args)
    return Machine(
        config,
        CostModel.from_dict(config.cost_model),
        {
            part.way: [
                step
                for name in WAYS[part.way]
                for step in steps[name]
                if part.begin_s <= step.planned_s <= part.end_s
            ]
            for part in warm
        },
        measured_link({name: read_engine(found) for name, found in early.items()}, size),
        size / config.block_size,
    )


async def _live(
    args: Mapping[str, Any], loads: Sequence[NamedLoad], repeats: int, folder: Path
) -> tuple[list[Warm], Traces]:
    async with live_fleet(args, ENGINES, folder) as fleet:
        return await serve_all(fleet, loads, repeats)


def measure(
    args: Mapping[str, Any], loads: Sequence[NamedLoad], repeats: int, tbt_ms: float, ttft_ms: float
) -> dict[str, Any]:
    """Live, then simulated. Raises MeasurementError if something failed."""
    with tempfile.TemporaryDirectory(prefix="legato-ways-") as folder:
        warm, traces = asyncio.run(_live(args, loads, repeats, Path(folder)))
        machine = read_machine(Path(folder), warm, args)
    deployments = {way: deployment_of(way, machine) for way in WAYS}
    rows = []
    for named in loads:
        jobs = named.load.jobs()
        live = {way: live_figures(traces[named.name, way], tbt_ms, ttft_ms) for way in WAYS}
        simulated = {way: simulated_figures(jobs, deployments[way], ttft_ms) for way in WAYS}
        rows.append(
            {
                "load": named.name,
                "lengths": named.load.lengths,
                "qps": named.load.qps,
                "num_requests": len(jobs),
                "tokens_equal": tokens_equal(traces, named.name),
                "live": live,
                "simulated": simulated,
                "orders": orders(live, simulated),
            }
        )
    return {
        "cost_model": machine.config.cost_model,
        "slowdown": {
            way: dataclasses.asdict(slowdown(steps, machine.profile))
            for way, steps in machine.steps.items()
        },
        "link": dataclasses.asdict(machine.link),
        "kv_bytes_per_token": machine.token_bytes,
        "loads": rows,
    }


def command(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="Settings of each engine.")] = Path(
        "configs/serve/bench_135m.yaml"
    ),
    loads: Annotated[str, typer.Option(help="NAME=LENGTHS@QPS, by commas.")] = LOADS,
    only: Annotated[str, typer.Option(help="Names of the loads to run; all if empty.")] = "",
    seconds: Annotated[float, typer.Option(min=1.0, help="Arrivals of one run.")] = 25.0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, of which the mean is told.")] = 1,
    tbt_ms: Annotated[float, typer.Option(min=1.0, help="The TBT objective.")] = 100.0,
    ttft_ms: Annotated[float, typer.Option(min=1.0, help="The TTFT objective.")] = 2000.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Colocated, split and flexible engines of this machine, live and simulated: the same order?

    Exits with status 1 where a figure of a load has them in opposite orders, or tokens differ.
    """
    named = [NamedLoad.parse(text, seconds, seed) for text in loads.split(",")]
    if only:
        named = [load for load in named if load.name in only.split(",")]
    if not named:
        raise typer.BadParameter(f"no load of this name: {only}")
    lasts_s = 60 + len(named) * len(WAYS) * (repeats * (seconds + 6) + _WARM_S + 3)
    say_duration(lasts_s, 1.5 * lasts_s, f"{len(ENGINES)} live engines, one thread each")
    found = measure(args_of(config, tbt_ms, ttft_ms), named, repeats, tbt_ms, ttft_ms)
    publish(make_report(context, found), as_json, out)
    if not as_json:
        _show(found)
    rows = found["loads"]
    is_opposite = any(o["verdict"] == "opposite" for row in rows for o in row["orders"].values())
    if is_opposite or not all(row["tokens_equal"] for row in rows):
        raise typer.Exit(1)


def _show(found: Mapping[str, Any]) -> None:
    names = (*FIGURES, "tbt_p50_ms")
    cells = []
    for row in found["loads"]:
        for way in WAYS:
            live, told = row["live"][way], row["simulated"][way]
            cells.append(
                (
                    row["load"],
                    f"{row['qps']:g}",
                    way,
                    *(f"{live[name]:.3g} / {told[name]:.3g}" for name in names),
                )
            )
    columns = ("load", "QPS", "way", "TTFT P50, ms", "TTFT P99", "TBT P99", "goodput", "TBT P50")
    output.print(table("live / simulated", columns, cells, num_words=3))
    better = [
        (
            row["load"],
            *(
                f"{o['live']} / {o['simulated']}" + ("" if o["verdict"] == "same" else " !")
                for o in row["orders"].values()
            ),
        )
        for row in found["loads"]
    ]
    title = f"the better of colocated and split, live / simulated; even within {EVEN:.0%}"
    output.print(table(title, ("load", "TTFT P50", "TTFT P99", "TBT P99", "goodput"), better))
    differ = [row["load"] for row in found["loads"] if not row["tokens_equal"]]
    output.print(f"tokens of the ways: {'differ in ' + ', '.join(differ) if differ else 'equal'}")
    link = found["link"]
    output.print(
        f"KV: {link['bytes_per_s'] / 1e6:.0f} MB/s, {1e3 * link['latency_s']:.1f} ms before a fetch"
    )
