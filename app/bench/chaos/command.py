"""`legato chaos`: a server of its own under load, its processes and files under fire."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from app.bench.chaos import census
from app.bench.chaos.faults import FAULTS
from app.bench.chaos.figures import chaos_figures, chaos_lines, chaos_table
from app.bench.chaos.fleet_faults import FLEET_FAULTS
from app.bench.chaos.own_server import OwnServer, is_fleet, own_server
from app.bench.chaos.requests import ChaosAnswer, draw_pool, unfailed
from app.bench.chaos.run import ChaosRecord, ChaosRun, new_session
from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, console, output, say_duration
from app.paths import DEMO_CONFIG

Config = Annotated[Path, typer.Option(help="The Serve config to run; one replica.")]
ChaosConfig = Annotated[
    Path, typer.Option(help="The Serve config to run: one replica, or a fleet of fixed size.")
]
POOL = 25  # the canary, and every kind of request three times
# Deadlines that suit steps of milliseconds; a deployment of a large model has longer ones.
SETTINGS = {"engine": {"step_deadline_s": 5.0}, "api": {"send_timeout_s": 10.0}}


def command(
    context: typer.Context,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long faults come.")] = 10.0,
    count: Annotated[
        int | None, typer.Option(min=1, help="So many faults, if they come in that time.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of requests, faults and their times.")] = 0,
    config: ChaosConfig = DEMO_CONFIG,
    streams: Annotated[int, typer.Option(min=1, help="Requests open at a time.")] = 12,
    qps: Annotated[float, typer.Option(min=0.0, help="Short requests a second beside.")] = 0.0,
    faults: Annotated[
        str, typer.Option(help="Kinds, comma separated; all, or none for the load alone.")
    ] = "all",
    log: Annotated[Path, typer.Option(dir_okay=False, help="The server's output.")] = Path(
        "out/chaos-server.log"
    ),
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Kill, stop and starve a server under load; every stream must be as without faults.

    Of a fleet, engines die, leave, come and are updated.

    Exits with status 1 when a token was lost, doubled or changed, or anything leaked.
    """
    kinds = kinds_of(faults, FLEET_FAULTS if is_fleet(config) else FAULTS)
    say_duration(60 * minutes + 60, 60 * minutes + 180, f"{len(kinds)} kinds of faults")
    load = ChaosLoad(60 * minutes, seed, streams, qps, kinds, count)
    found = measure(config, load, log)
    publish(
        make_report(context, found, {"kinds": kinds, "server": SETTINGS, "log": log.name}),
        as_json,
        out,
    )
    if not as_json:
        output.print(chaos_table(found))
        for line in chaos_lines(found):
            output.print(line, soft_wrap=True)
    if not found["is_clean"]:
        raise typer.Exit(1)


def kinds_of(names: str, known: Collection[str] = FAULTS) -> list[str]:
    """The named kinds of faults. Raises typer.BadParameter for an unknown one."""
    if names in ("all", "none"):
        return list(known) if names == "all" else []
    chosen = [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in known]:
        raise typer.BadParameter(f"no fault {unknown[0]!r}: {', '.join(known)}",
                                 param_hint="--faults")  # fmt: skip
    return chosen


@dataclass(frozen=True, slots=True)
class ChaosLoad:
    """The load on a server. num_faults: the most faults."""

    seconds: float
    seed: int
    num_streams: int
    qps: float
    kinds: list[str]
    num_faults: int | None


def measure(config: Path, load: ChaosLoad, log: Path) -> dict[str, Any]:
    """Run the load under faults; returns the figures."""
    with own_server(config, SETTINGS, log, records=True) as server:
        seen, wanted, leaks, extra = asyncio.run(_run(server, load))
    return {**chaos_figures(seen, wanted, leaks, server.left_over), **extra}


async def _run(
    server: OwnServer, load: ChaosLoad
) -> tuple[ChaosRecord, list[ChaosAnswer], list[str], dict[str, Any]]:
    pool = draw_pool(load.seed, server.model, POOL)
    async with new_session() as session:
        with console.status(f"{POOL} requests without faults"):
            wanted = await unfailed(session, server.url, pool)
            if wrong := next((a for a in wanted if a.error is not None), None):
                raise MeasurementError(f"without any fault: {wrong.request.kind}: {wrong.error}")
            run = ChaosRun(
                server,
                session,
                pool,
                wanted,
                seed=load.seed,
                num_streams=load.num_streams,
                kinds=load.kinds,
                qps=load.qps,
            )
            await run.warm_up()
        await asyncio.to_thread(census.settle, server)
        before = await asyncio.to_thread(census.count, server)
        seen = await run.run(load.seconds, load.num_faults)
    await asyncio.to_thread(census.settle, server)
    leaks, after = await asyncio.to_thread(census.settled_leaks, server, before)
    return seen, wanted, leaks, {"before": before.to_dict(), "after": after.to_dict()}
