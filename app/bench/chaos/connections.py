"""`legato bench connections`: thousands of connections, and what they cost other clients."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from app.bench.chaos import census
from app.bench.chaos.command import Config
from app.bench.chaos.others import NUM_OTHERS, other_streams
from app.bench.chaos.own_server import OwnServer, own_server
from app.bench.chaos.probe import probing, spread_ms
from app.bench.chaos.soak import memory_bytes
from app.bench.load.client import Job, LoadClient, Trace
from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, output, table
from app.paths import DEMO_CONFIG

_AT_A_TIME = 200  # connections being opened
_PHASE_S = 10.0
_STREAM_TOKENS = 2000  # more than come while others are measured
_OPEN_WITHIN_S = 120.0  # all streams
_LOOK_EVERY_S = 0.5
_OPEN = ("num_waiting", "num_prefilling", "num_decoding")
_GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
_Exchange = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def command(
    context: typer.Context,
    idle: Annotated[int, typer.Option(min=0, help="Connections that ask nothing more.")] = 5000,
    streams: Annotated[int, typer.Option(min=1, help="Streams open at a time.")] = 1000,
    config: Config = DEMO_CONFIG,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Memory, the event loop's lag and others' TBT: alone, beside idle connections, beside streams.

    The server may run as many requests together as there are streams.
    """
    num_files = _allow_files(2 * (idle + streams) + 1000)
    args: dict[str, dict[str, Any]] = {
        "scheduling": {"max_requests": streams + NUM_OTHERS},
        "kv": {"memory_gib": 1.5},
    }
    with own_server(config, args, Path("out/connections-server.log")) as server:
        found = asyncio.run(measure(server, idle, streams))
    publish(make_report(context, found, {"server": args, "open_files": num_files}), as_json, out)
    if not as_json:
        output.print(_table(found))


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
    idle, streams = _Idle(server.url, num_idle), _Streams(server, num_streams)
    async with other_streams(server) as others:
        await _phase(server, others)  # everything is loaded and warm
        phases = {"alone": await _phase(server, others)}
        await idle.open()
        phases["idle connections"] = await _phase(server, others, idle)
    try:
        # They run before the streams come: later ones wait behind those that wait.
        async with other_streams(server) as others:
            await streams.open(NUM_OTHERS)
            await idle.open()  # a server closes what has been idle for long
            phases["idle connections and streams"] = await _phase(server, others, idle, streams)
    finally:
        gaps_s = await streams.close()
    idle.close()
    await asyncio.to_thread(census.settle, server)
    phases["after"] = {"memory_mib": _memory(server)}
    return {
        "num_idle_asked": num_idle,
        "num_streams": num_streams,
        "streams_tbt_ms": spread_ms(gaps_s),
        "phases": phases,
        "bytes_per_idle_connection": _each(phases),
    }


class _Idle:
    """Idle connections that have sent one request, like those of a client's pool."""

    def __init__(self, url: str, count: int) -> None:
        self._address = urlsplit(url)
        self._connections: list[_Exchange | None] = [None] * count

    async def open(self) -> None:
        """Open the connections that are not open; each sends a request."""
        gate = asyncio.Semaphore(_AT_A_TIME)

        async def ask(old: _Exchange | None) -> _Exchange:
            async with gate:
                if old is None or old[0].at_eof():
                    old = await asyncio.open_connection(self._address.hostname, self._address.port)
                reader, writer = old
                writer.write(_GET)
                with suppress(asyncio.IncompleteReadError, ConnectionError):
                    await reader.readuntil(b"\r\n\r\n")
                    await reader.readuntil(b"}")
                return old

        self._connections = list(await asyncio.gather(*map(ask, self._connections)))

    @property
    def num_open(self) -> int:
        return sum(one is not None and not one[0].at_eof() for one in self._connections)

    def close(self) -> None:
        for one in self._connections:
            if one is not None:
                one[1].transport.abort()


class _Streams:
    """Streams that stay open until `close`."""

    def __init__(self, server: OwnServer, count: int) -> None:
        self._server = server
        self._client = LoadClient(server.url, server.model)
        self._jobs = [Job(0.0, 16, _STREAM_TOKENS)] * count
        self._traces: list[Trace] = []
        self._load: asyncio.Task[list[Trace]] | None = None

    async def open(self, num_others: int) -> None:
        """Until the engine has all of them, beside others. Raises MeasurementError if it never
        does."""
        self._load = asyncio.create_task(self._client.run(self._jobs, on_start=self._traces.append))
        deadline_s = time.monotonic() + _OPEN_WITHIN_S
        while sum((await self.states()).values()) < len(self._jobs) + num_others:
            self.check()
            if time.monotonic() > deadline_s:
                raise MeasurementError(
                    f"{len(self._jobs)} streams were not open together within {_OPEN_WITHIN_S:g} s"
                )
            await asyncio.sleep(0.1)

    async def states(self) -> dict[str, int]:
        """The engine's number of requests by state."""
        status = await asyncio.to_thread(self._server.status)
        return {state: int(status[state]) for state in _OPEN}

    def check(self) -> None:
        """Check that all streams are open. Raises MeasurementError if one failed or ended."""
        if error := next((trace.error for trace in self._traces if trace.error), None):
            raise MeasurementError(f"a stream failed: {error}")
        if any(trace.num_tokens for trace in self._traces):
            raise MeasurementError(
                f"a stream has ended, after {_STREAM_TOKENS} tokens: ask for fewer"
            )

    async def close(self) -> list[float]:
        """Disconnect the clients; returns the times between tokens of all streams."""
        if self._load is not None:
            self._load.cancel()
            with suppress(asyncio.CancelledError):
                await self._load
        return [gap for trace in self._traces for gap in trace.gaps_s]


def _each(phases: dict[str, Any]) -> float:
    """Replica memory per idle connection, in bytes."""
    before, after = phases["alone"], phases["idle connections"]
    grown = after["memory_mib"]["replica"] - before["memory_mib"]["replica"]
    return float(grown) * 2**20 / max(1, after["num_idle"])


async def _phase(
    server: OwnServer,
    others: Connection,
    idle: _Idle | None = None,
    streams: _Streams | None = None,
) -> dict[str, Any]:
    """Figures of a few other streams for a while, and the event loop's lag meanwhile.

    open_streams: by state of the request, the least and most seen; the others are among them.
    Raises MeasurementError if the others got no answer."""
    states: list[dict[str, int]] = []
    async with probing(server.url) as live:
        begin_s = time.monotonic()
        while (left_s := begin_s + _PHASE_S - time.monotonic()) > 0:
            if streams is not None:
                states.append(await streams.states())
                streams.check()
            await asyncio.sleep(min(_LOOK_EVERY_S, left_s))
        others.send((begin_s, begin_s + _PHASE_S))
        gaps_s = await asyncio.to_thread(others.recv)
        memory = await asyncio.to_thread(_memory, server)
    if isinstance(gaps_s, str) or not gaps_s:
        raise MeasurementError(f"the other streams: {gaps_s or 'no token came'}")
    return {
        "num_idle": 0 if idle is None else idle.num_open,
        "open_streams": _extremes(states),
        "others_tbt_ms": spread_ms(gaps_s),
        "live": live,
        "memory_mib": memory,
    }


def _extremes(states: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """The least and the most of each state, and of all together.

    >>> _extremes([{"num_waiting": 3, "num_decoding": 1}, {"num_waiting": 0, "num_decoding": 5}])
    {'num_waiting': [0, 3], 'num_decoding': [1, 5], 'all': [4, 5]}
    """
    if not states:
        return {}
    rows = [{**state, "all": sum(state.values())} for state in states]
    return {name: [min(r[name] for r in rows), max(r[name] for r in rows)] for name in rows[0]}


def _memory(server: OwnServer) -> dict[str, float]:
    return {kind: size / 2**20 for kind, size in memory_bytes(server).items()}


def _table(found: dict[str, Any]) -> Any:
    rows = []
    for name, phase in found["phases"].items():
        memory = f"{sum(phase['memory_mib'].values()):.0f}"
        if "live" not in phase:
            rows.append((name, memory, "", "", "", "", "", ""))
            continue
        tbt, live, lag = phase["others_tbt_ms"], phase["live"]["ms"], phase["live"]["loop_lag"]
        most = lag["at_most_ms"]
        decoding = phase["open_streams"].get("num_decoding", ())
        rows.append(
            (
                name,
                memory,
                " to ".join(map(str, decoding)),
                f"{tbt['p50']:.0f}",
                f"{tbt['p99']:.0f}",
                f"{live['p50']:.0f}",
                f"{live['longest']:.0f}",
                "seconds" if most is None else f"{most:.0f}",
            )
        )
    title = f"{found['num_idle_asked']} idle connections, {found['num_streams']} streams"
    columns = (
        "",
        "MiB",
        "decoding",
        "others' TBT P50, ms",
        "P99",
        "/live P50, ms",
        "longest",
        "loop late by at most",
    )
    return table(title, columns, rows)
