"""`legato bench overhead`: what a streamed token and an iteration cost outside the model.

Run it on the machine that serves: CPU time is read per process before and after a load of steady
streams, and iterations' own clocks (from the console's feed) give the gap between steps.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import httpx
import psutil
import typer
from rich.console import Console
from rich.table import Table

from app.bench.load.client import Job, LoadClient
from app.bench.load.generator import first_model, publish
from app.bench.machine import describe

# Process title -> what people call it. Everything else of Ray's is "ray".
_KINDS = (
    ("ray::ServeReplica", "replica"),
    ("ray::SchedulerActor", "scheduler"),
    ("ray::StageActor", "stage"),
    ("haproxy", "haproxy"),
    ("legato serve", "driver"),
    ("ray::", "ray"),
    ("raylet", "ray"),
    ("gcs_server", "ray"),
    ("/ray/", "ray"),
)


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds by kind of process, and the seconds over which they were used."""

    cpu_s: dict[str, float]
    span_s: float

    def percent(self, kind: str) -> float:
        return 100 * self.cpu_s.get(kind, 0.0) / self.span_s


def _cpu_by_kind() -> dict[str, float]:
    usage: dict[str, float] = {}
    for process in psutil.process_iter():
        try:
            title = " ".join(process.cmdline())
            times = process.cpu_times()
        except psutil.Error:
            continue  # it ended meanwhile
        kind = next((kind for mark, kind in _KINDS if mark in title), None)
        if kind is not None:
            usage[kind] = usage.get(kind, 0.0) + times.user + times.system
    return usage


class Meter:
    """CPU used between two moments."""

    def __init__(self) -> None:
        self._begin_s, self._begin = time.monotonic(), _cpu_by_kind()

    def read(self) -> Usage:
        now = _cpu_by_kind()
        span_s = time.monotonic() - self._begin_s
        return Usage({k: now[k] - self._begin.get(k, 0.0) for k in now}, span_s)


def settle(limit_s: float = 120.0) -> None:
    """Wait until the stages rest: after its start one still clears KV memory, on idle cores."""
    give_up_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_s:
        meter = Meter()
        time.sleep(1.0)
        if meter.read().percent("stage") < 5.0:
            return


def _feed(url: str, stop: threading.Event) -> Iterator[dict[str, Any]]:
    with httpx.stream("GET", f"{url}/console/feed", timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield from json.loads(line.removeprefix("data: "))
            if stop.is_set():
                return


def bench_overhead(
    url: Annotated[str, typer.Option(help="A server on this machine.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option()] = None,
    streams: Annotated[int, typer.Option(min=1)] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per stream.")] = 400,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt of each stream.")] = 16,
    idle_s: Annotated[float, typer.Option(min=1.0)] = 10.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """CPU per streamed token and per iteration by process; CPU while idle."""
    client = LoadClient(url, model or first_model(url))
    asyncio.run(client.run([Job(0.0, 16, 16)] * 4))  # warm up
    settle()
    meter = Meter()
    time.sleep(idle_s)
    idle = meter.read()

    # First without the feed, for CPU; then with it, for the gaps between steps.
    jobs = [Job(0.0, prompt_tokens, tokens)] * streams
    meter = Meter()
    traces = asyncio.run(client.run(jobs))
    load = meter.read()
    gaps_s = _gaps(url, client, jobs)
    num_tokens = sum(t.num_tokens for t in traces)
    extra = {kind: load.cpu_s[kind] - idle.percent(kind) / 100 * load.span_s for kind in load.cpu_s}
    outside = sum(cpu_s for kind, cpu_s in extra.items() if kind != "stage")
    beside = sum(load.percent(kind) for kind in load.cpu_s if kind != "stage")
    result = {
        "machine": describe(),
        "streams": streams,
        "prompt_tokens": prompt_tokens,
        "num_tokens": num_tokens,
        "span_s": load.span_s,
        "cpu_us_per_token": {k: 1e6 * v / num_tokens for k, v in extra.items()},
        "cpu_us_per_token_outside_stage": 1e6 * outside / num_tokens,
        "gap_between_steps_ms_p50": 1e3 * statistics.median(gaps_s),
        "gap_between_steps_ms_p90": 1e3 * statistics.quantiles(gaps_s, n=10)[-1],
        "load_percent_of_one_core": {k: load.percent(k) for k in load.cpu_s},
        "load_percent_of_one_core_outside_stage": beside,
        "idle_percent_of_one_core": {k: idle.percent(k) for k in idle.cpu_s},
        "idle": asdict(idle),
    }
    publish(result, as_json, None)
    if not as_json:
        _print(result)


def _gaps(url: str, client: LoadClient, jobs: list[Job]) -> list[float]:
    """Seconds between the end of a full step and the begin of the next, first stage."""
    stop = threading.Event()
    records: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: records.extend(_feed(url, stop)), daemon=True)
    reader.start()
    time.sleep(0.5)
    asyncio.run(client.run(jobs))
    stop.set()
    asyncio.run(client.run(jobs[:1]))  # one more event, so that the reader sees the flag
    reader.join(30)
    full = [r for r in records if r["num_decode_tokens"] == len(jobs)]
    return [
        later["stages_s"][0][0] - earlier["stages_s"][0][1]
        for earlier, later in itertools.pairwise(full)
        if later["step"] == earlier["step"] + 1
    ] or [float("nan")] * 2


def _print(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['streams']} streams", title_justify="left")
    for column in ("process", "us CPU per token", "% of a core", "% of a core idle"):
        table.add_column(column, justify="left" if column == "process" else "right")
    idle, busy = result["idle_percent_of_one_core"], result["load_percent_of_one_core"]
    for kind, us in sorted(result["cpu_us_per_token"].items(), key=lambda item: -item[1]):
        table.add_row(kind, f"{us:.1f}", f"{busy[kind]:.1f}", f"{idle.get(kind, 0.0):.1f}")
    console = Console(stderr=True, highlight=False)
    console.print(table)
    console.print(
        f"outside the stages {result['cpu_us_per_token_outside_stage']:.1f} us per token, "
        f"{result['load_percent_of_one_core_outside_stage']:.1f} % of a core while they compute; "
        f"gap between steps {result['gap_between_steps_ms_p50']:.2f} ms (median), "
        f"{result['gap_between_steps_ms_p90']:.2f} ms (P90)"
    )


def register(bench: typer.Typer) -> None:
    bench.command("overhead")(bench_overhead)
