"""`legato bench soak`: does a server under load for a long time hold more and more memory?"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from app.bench.chaos import census
from app.bench.chaos.command import Config
from app.bench.chaos.own_server import OwnServer, own_server
from app.bench.load.client import LoadClient, Trace
from app.bench.load.figures import load_figures
from app.bench.load.workload import LengthsOption, Load
from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, console, output, say_duration, table
from app.paths import DEMO_CONFIG

SEGMENT_S = 30.0
_WARM_SHARE = 0.25  # of the segments, at the start: caches fill, pages are touched
_OF_OUTLOOK = 0.6


def command(
    context: typer.Context,
    minutes: Annotated[float, typer.Option(min=2.0, help="Length of the load.")] = 30.0,
    config: Config = DEMO_CONFIG,
    lengths: LengthsOption = "512x128",
    qps: Annotated[
        float | None,
        typer.Option(min=0.01, help="Without it, 0.6 of what the server says it can serve."),
    ] = None,
    limit_percent: Annotated[
        float, typer.Option(min=0.0, help="Growth after the warm-up that passes.")
    ] = 2.0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Memory of all processes at rest between segments of load, and how much it has grown.

    Exits with status 1 when it grew by more than the limit, or a request failed.
    """
    say_duration(60 * minutes + 60, 80 * minutes + 60, f"load for {minutes:g} minutes")
    with own_server(config, {}, Path("out/soak-server.log")) as server:
        found = measure(server, minutes, lengths, qps)
    publish(make_report(context, found, {"qps": found["qps"]}), as_json, out)
    if not as_json:
        rows = [
            (kind, f"{row['first_mib']:.0f}", f"{row['last_mib']:.0f}", f"{row['percent']:+.2f}")
            for kind, row in found["growth"].items()
        ]
        title = f"memory at rest, {found['num_requests']} requests at {found['qps']:.1f} a second"
        output.print(table(title, ("processes", "MiB after warm-up", "at the end", "%"), rows))
    if found["growth"]["all"]["percent"] > limit_percent or found["num_failed"]:
        console.print(f"[red]grown beyond {limit_percent:g} %, or failed:[/]", found["first_error"])
        raise typer.Exit(1)


def measure(server: OwnServer, minutes: float, lengths: str, qps: float | None) -> dict[str, Any]:
    """Run the segments in turn, with a sample of memory after each."""
    qps = qps or _promised_qps(server)
    client = LoadClient(server.url, server.model)
    samples: list[dict[str, int]] = []
    traces: list[Trace] = []
    num_segments = max(4, round(60 * minutes / SEGMENT_S))
    for number in range(num_segments):
        load = Load(lengths, qps, SEGMENT_S, seed=number)
        traces += asyncio.run(client.run(load.jobs()))
        census.settle(server)
        samples.append(memory_bytes(server))
        total = sum(samples[-1].values()) >> 20
        console.print(f"  {number + 1:3d} of {num_segments}: {total} MiB")
    figures = load_figures(traces)
    figures.check_measured()
    return {
        "qps": qps,
        "num_requests": figures.num_requests,
        "num_failed": figures.num_failed,
        "first_error": figures.first_error,
        "tbt_p99_ms": figures.tbt_p99_ms,
        "ttft_p50_ms": figures.ttft_p50_ms,
        "growth": growth(samples),
        "samples_mib": [{k: v >> 20 for k, v in sample.items()} for sample in samples],
    }


def _promised_qps(server: OwnServer) -> float:
    promised = server.status().get("outlook")
    if not promised:
        raise MeasurementError("the server publishes no prediction of its capacity: give --qps")
    return _OF_OUTLOOK * float(promised["chat_qps"])


def memory_bytes(server: OwnServer) -> dict[str, int]:
    """Memory by kind of process: proportional set sizes (PSS), so that nothing is counted twice."""
    found: dict[str, int] = {}
    for kind, processes in server.processes().items():
        for process in processes:
            with suppress(psutil.Error):
                found[kind] = found.get(kind, 0) + process.memory_full_info().pss
    return found


def growth(samples: Sequence[dict[str, int]]) -> dict[str, dict[str, float]]:
    """Growth after the warm-up: median of the last third over that of the first third."""
    kept = samples[int(_WARM_SHARE * len(samples)) :]
    third = max(1, len(kept) // 3)
    rows: dict[str, dict[str, float]] = {}
    for kind in ("all", *sorted(kept[0])):
        sizes = [sum(s.values()) if kind == "all" else s.get(kind, 0) for s in kept]
        first, last = statistics.median(sizes[:third]), statistics.median(sizes[-third:])
        rows[kind] = {
            "first_mib": first / 2**20,
            "last_mib": last / 2**20,
            "percent": 100 * (last / first - 1) if first else 0.0,
        }
    return rows
