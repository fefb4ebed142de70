"""Benchmark `startup`: how long a server takes until it answers, and what takes the time.

The elapsed parts are those that `legato serve` prints: its own imports, Ray, Serve, the model. They
overlap with work of other processes, so the CPU time of every kind of process, from its start until
the server answers, stands beside them. Imports of Ray, Serve and torch are those of the process
whose forks the others are. The first start is not counted: it may measure the cost model and fill
the page cache.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from app.bench.plan import ServerPlan
from app.bench.report import MeasurementError, make_report, publish
from app.bench.server_process import running
from app.bench.terminal import Json, Out, output, progress, table
from app.paths import DEMO_CONFIG

_READY = re.compile(r"ready in ([\d.]+) s: (.*?)\)")
_PRINTED_WITHIN_S = 20.0
# Part of a process's command line -> what it does. A worker without either is Serve's or idle.
_KINDS = (
    ("forked_workers", "imports of Ray, Serve, torch"),
    ("ray::ServeReplica", "replica"),
    ("ray::SchedulerActor", "scheduler"),
    ("ray::StageActor", "stage"),
    ("app.text.", "grammars and templates"),
    ("gcs_server", "Ray's daemons"),
    ("raylet/raylet", "Ray's daemons"),
    ("RuntimeEnvAgent", "Ray's daemons"),
    ("runtime_env", "Ray's daemons"),
    (" serve ", "command"),
)
_OTHER = "Serve's controller and tasks"


def parts_of(line: str) -> dict[str, float]:
    """Seconds by part and in all, from the line that says that a server is ready.

    >>> parts_of("Legato serves m at u  (ready in 6.2 s: imports 0.4, model 5.8)")
    {'imports': 0.4, 'model': 5.8, 'in all': 6.2}
    """
    found = _READY.search(line)
    if found is None:
        raise MeasurementError(f"no times of a start in {line!r}")
    parts = (part.rsplit(" ", 1) for part in found[2].split(", "))
    return {**{name: float(seconds) for name, seconds in parts}, "in all": float(found[1])}


def command(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A Serve config (YAML).")] = DEMO_CONFIG,
    runs: Annotated[int, typer.Option(min=1, help="Starts that are counted.")] = 5,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the server.")] = 8080,
    rest_s: Annotated[float, typer.Option(min=0, help="Seconds from an end to a start.")] = 10.0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Start a server several times; elapsed and CPU time until it answers, by part."""
    elapsed, cpu = [], []
    for number in progress(range(runs + 1), "starting"):
        if number:
            time.sleep(rest_s)
        one_elapsed, one_cpu = _start(config, port)
        if number:
            elapsed.append(one_elapsed)
            cpu.append(one_cpu)
    results = {"elapsed_s": _medians(elapsed), "cpu_s": _medians(cpu)}
    each_s = sorted(one["in all"] for one in elapsed)
    if not as_json:
        for title, medians in zip(("Elapsed, s", "CPU, s"), results.values(), strict=True):
            rows = [(name, f"{seconds:.1f}") for name, seconds in medians.items()]
            output.print(table(title, ("part", "median"), rows))
        output.print("each start, s: " + ", ".join(f"{seconds:.1f}" for seconds in each_s))
    publish(make_report(context, {**results, "each_s": each_s}), as_json, out)


def _start(config: Path, port: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by part, and CPU seconds by kind of process."""
    plan = ServerPlan(
        command=f"legato serve {config} --port {port}", url=f"http://127.0.0.1:{port}"
    )
    before = {process.pid for process in psutil.Process().children()}
    with tempfile.TemporaryDirectory() as folder, running("legato", plan, Path(folder)):
        (server,) = (p for p in psutil.Process().children() if p.pid not in before)
        cpu_s = _cpu_by_kind(server)
        give_up_s = time.monotonic() + _PRINTED_WITHIN_S
        while not _READY.search(said := (Path(folder) / "legato.log").read_text()):
            if time.monotonic() > give_up_s:
                raise MeasurementError(f"the server printed no times: {said!r}")
            time.sleep(0.1)
    return parts_of(said), cpu_s


def _cpu_by_kind(server: psutil.Process) -> dict[str, float]:
    """CPU seconds of the server's live processes, by kind."""
    found: dict[str, float] = {}
    for process in [server, *server.children(recursive=True)]:
        try:
            title, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue  # it has ended
        kind = next((kind for mark, kind in _KINDS if mark in title), _OTHER)
        found[kind] = found.get(kind, 0.0) + times.user + times.system
    found["in all"] = sum(found.values())
    return found


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(r.get(name, 0.0) for r in runs), 2) for name in runs[0]}
