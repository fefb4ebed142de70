"""`legato bench recovery`: how long streams pause when a process of the engine dies or stops."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from app.bench.chaos import census
from app.bench.chaos.command import Config
from app.bench.chaos.own_server import OwnServer, own_server
from app.bench.load.client import Job, LoadClient, Trace
from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, console, output, table
from app.paths import DEMO_CONFIG

_DEADLINE_S = 2.0
_STREAMS, _JOB = 8, Job(0.0, 32, 400)
_STRIKE_AFTER_S = 0.3  # of the streams' start: all of them decode

# What happens -> the kind of process, the signal, what the scheduler needs to notice it.
_FAULTS = {
    "stage killed": ("stage", signal.SIGKILL, 0.0),
    "stage stopped": ("stage", signal.SIGSTOP, _DEADLINE_S),
    "scheduler killed": ("scheduler", signal.SIGKILL, 0.0),
}


def command(
    context: typer.Context,
    config: Config = DEMO_CONFIG,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 2,
    times: Annotated[int, typer.Option(min=1, help="How often each fault comes.")] = 3,
    rest_s: Annotated[float, typer.Option(min=0.0, help="Between faults.")] = 10.0,
    log: Annotated[Path, typer.Option(dir_okay=False, help="The server's output.")] = Path(
        "out/recovery-server.log"
    ),
    as_json: Json = False,
    out: Out = None,
) -> None:
    """The longest gap of eight streams at each fault, less the step's deadline."""
    args: dict[str, dict[str, Any]] = {
        "engine": {"step_deadline_s": _DEADLINE_S},
        "parallel": {"pipeline_stages": stages},
    }
    with own_server(config, args, log) as server:
        found = {name: asyncio.run(_pauses_s(server, name, times, rest_s)) for name in _FAULTS}
    publish(make_report(context, {"pauses_s": found}, {"server": args}), as_json, out)
    if not as_json:
        rows = [
            (name, *(f"{pause:.1f}" for pause in sorted(pauses))) for name, pauses in found.items()
        ]
        title = f"Longest pause of {_STREAMS} streams, s"
        output.print(table(title, ("", *[""] * times), rows))


async def _pauses_s(server: OwnServer, name: str, times: int, rest_s: float) -> list[float]:
    pauses = []
    for number in range(times):
        with console.status(f"{name}, {number + 1} of {times}"):
            await asyncio.sleep(rest_s)
            pauses.append(await pause_s(server, *_FAULTS[name]))
            await asyncio.to_thread(census.settle, server)
    return pauses


async def pause_s(server: OwnServer, kind: str, blow: signal.Signals, noticed_s: float) -> float:
    """The longest gap of streams in whose middle a process is struck, less `noticed_s`.

    Raises MeasurementError as `longest_gap_s`."""
    pid, client = server.pids(kind)[-1], LoadClient(server.url, server.model)
    begin_s = time.perf_counter()
    async with client.session() as session:
        sent = [asyncio.create_task(client.send(session, _JOB, begin_s)) for _ in range(_STREAMS)]
        await asyncio.sleep(_STRIKE_AFTER_S)
        os.kill(pid, blow)
        struck_s = time.perf_counter() - begin_s
        return longest_gap_s(await asyncio.gather(*sent), struck_s) - noticed_s


def longest_gap_s(traces: Sequence[Trace], struck_s: float) -> float:
    """Of streams of which a process was struck at this time of theirs.

    Raises MeasurementError if one failed, or had ended before."""
    if wrong := next((t.problem for t in traces if t.problem), None):
        raise MeasurementError(f"a stream failed: {wrong}")
    if any(trace.event_times_s[-1] <= struck_s for trace in traces):
        raise MeasurementError(
            f"a stream had ended before the fault, {struck_s:.1f} s after it began"
        )
    return max(max(trace.gaps_s) for trace in traces)
