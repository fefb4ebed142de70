"""`legato bench connections`: thousands of connections, and what they cost other clients."""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from app.bench.chaos import census
from app.bench.chaos.command import DEFAULT_CONFIG, Config
from app.bench.chaos.own_server import OwnServer, own_server
from app.bench.chaos.probe import probing, spread_ms
from app.bench.chaos.soak import memory_bytes
from app.bench.load.client import Job, LoadClient
from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, console, output, table

_AT_A_TIME = 200  # connections being opened
_OTHERS = 4
_OTHERS_TOKENS = 100
_OTHERS_S = 8.0  # of others' streams, one set after the other
_STREAM_TOKENS = 200
_OPEN_SHARE, _OPEN_WITHIN_S = 0.9, 60.0  # of the streams are open, before others are asked
_OPEN = ("num_waiting", "num_prefilling", "num_decoding")
_GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def command(
    context: typer.Context,
    idle: Annotated[int, typer.Option(min=0, help="Connections that ask nothing more.")] = 5000,
    streams: Annotated[int, typer.Option(min=1, help="Streams open at a time.")] = 1000,
    config: Config = DEFAULT_CONFIG,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Memory, the event loop's lag and others' TBT: alone, beside idle connections, beside streams.

    The server may run as many requests together as there are streams.
    """
    num_files = _allow_files(2 * (idle + streams) + 1000)
    args: dict[str, dict[str, Any]] = {
        "scheduling": {"max_requests": streams + _OTHERS},
        "kv": {"memory_gib": 1.5},
    }
    with own_server(config, args, Path("out/connections-server.log")) as server:
        found = asyncio.run(measure(server, idle, streams))
    publish(make_report(context, found, {"server": args, "open_files": num_files}), as_json, out)
    if not as_json:
        output.print(_table(found))
    if found["num_failed"]:
        console.print(f"[red]{found['num_failed']} streams failed:[/]", found["first_error"])
        raise typer.Exit(1)


def _allow_files(count: int) -> int:
    """For this process and the server, which inherits it: how many it is then. Raises
    MeasurementError where so many are not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, max(count, hard)))
        except (ValueError, OSError) as error:
            raise MeasurementError(
                f"{count} open files are needed, {hard} allowed (`ulimit -Hn`); or ask for fewer "
                f"(--idle, --streams): {error}"
            ) from error
    return max(soft, count)


async def measure(server: OwnServer, num_idle: int, num_streams: int) -> dict[str, Any]:
    """Three phases: alone, beside idle connections, beside streams as well."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as elsewhere:
        await _phase(server, elsewhere)  # everything is loaded and warm
        phases = {"alone": await _phase(server, elsewhere)}
        connections = await _open_idle(server.url, num_idle)
        phases["idle connections"] = await _phase(server, elsewhere)
        num_kept = sum(not reader.at_eof() for reader, _ in connections)
        client = LoadClient(server.url, server.model)
        jobs = [Job(0.0, 16, _STREAM_TOKENS)] * num_streams
        load = asyncio.create_task(client.run(jobs))
        num_running = await asyncio.to_thread(_running, server, round(_OPEN_SHARE * num_streams))
        phases["idle connections and streams"] = await _phase(server, elsewhere)
        traces = await load
        for _, writer in connections:
            writer.transport.abort()
    await asyncio.to_thread(census.settle, server)
    phases["after"] = {"memory_mib": _memory(server)}
    failed = [trace for trace in traces if not trace.finished]
    return {
        "num_idle": num_kept,
        "num_idle_asked": num_idle,
        "num_streams": num_streams,
        "num_running": num_running,
        "streams_tbt_ms": spread_ms([gap for trace in traces for gap in trace.gaps_s]),
        "num_failed": len(failed),
        "first_error": next((t.error for t in failed), None),
        "phases": phases,
        "bytes_per_idle_connection": _each(phases, num_kept),
    }


def _running(server: OwnServer, wanted: int) -> int:
    """Streams that decode, once so many are open. Raises MeasurementError if they never are."""
    deadline_s = time.monotonic() + _OPEN_WITHIN_S
    while time.monotonic() < deadline_s:
        status = server.status()
        if sum(int(status[key]) for key in _OPEN) >= wanted:
            return int(status["num_decoding"])
        time.sleep(0.1)
    raise MeasurementError(f"{wanted} streams were not open together within {_OPEN_WITHIN_S:g} s")


def _each(phases: dict[str, Any], num_idle: int) -> float:
    """Of the replica, which holds them."""
    before, after = (phases[name]["memory_mib"] for name in ("alone", "idle connections"))
    grown = after["replica"] - before["replica"]
    return float(grown) * 2**20 / max(1, num_idle)


async def _phase(server: OwnServer, elsewhere: ProcessPoolExecutor) -> dict[str, Any]:
    """What a few other streams see, from a process of their own, and the loop's lag meanwhile."""
    loop = asyncio.get_running_loop()
    async with probing(server.url, server.pids("replica")[0]) as live:
        gaps_s = await loop.run_in_executor(elsewhere, others_gaps_s, server.url, server.model)
        memory = await asyncio.to_thread(_memory, server)
    return {"others_tbt_ms": spread_ms(gaps_s), "live": live, "memory_mib": memory}


def others_gaps_s(url: str, model: str) -> list[float]:
    """Times between tokens of a few streams. Raises MeasurementError if one fails."""
    end_s = time.monotonic() + _OTHERS_S
    gaps_s: list[float] = []
    while time.monotonic() < end_s:
        jobs = [Job(0.0, 16, _OTHERS_TOKENS)] * _OTHERS
        traces = asyncio.run(LoadClient(url, model).run(jobs))
        if error := next((t.error for t in traces if t.error), None):
            raise MeasurementError(f"a stream failed: {error}")
        gaps_s += [gap for trace in traces for gap in trace.gaps_s]
    return gaps_s


def _memory(server: OwnServer) -> dict[str, float]:
    return {kind: size / 2**20 for kind, size in memory_bytes(server).items()}


async def _open_idle(
    url: str, count: int
) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections that have asked once, as those of a client's pool have."""
    address, gate = urlsplit(url), asyncio.Semaphore(_AT_A_TIME)

    async def one() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with gate:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(_GET)
            with suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
            return reader, writer

    return list(await asyncio.gather(*[one() for _ in range(count)]))


def _table(found: dict[str, Any]) -> Any:
    rows = []
    for name, phase in found["phases"].items():
        memory = sum(phase["memory_mib"].values())
        if "live" not in phase:
            rows.append((name, f"{memory:.0f}", "", "", "", "", ""))
            continue
        tbt, live = phase["others_tbt_ms"], phase["live"]["ms"]
        work = phase["live"]["replica_work_ms"]
        numbers = (memory, tbt["p50"], tbt["p99"], live["p50"], live["longest"], work["longest"])
        rows.append((name, *(f"{number:.0f}" for number in numbers)))
    title = f"{found['num_idle']} idle connections, {found['num_streams']} streams"
    columns = (
        "",
        "MiB",
        "others' TBT P50, ms",
        "P99",
        "/live P50, ms",
        "longest",
        "replica's work",
    )
    return table(title, columns, rows)
