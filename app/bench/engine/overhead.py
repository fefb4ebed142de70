"""`legato bench overhead`: what a streamed token and an iteration cost outside the model.

Run it on the machine that serves: CPU time is read per process before and after a load of steady
streams, and iterations' own clocks (from the console's feed) give the gap between steps.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import ssl
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import httpx
import typer

from app.bench.engine.cpu_usage import CpuMeter, CpuUsage, wait_until_idle
from app.bench.load.client import Job, LoadClient, Trace, first_model, server_root
from app.bench.load.serve import DEFAULT_URL, ApiKey, Model
from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, console, output, table


def command(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="A server on this machine.")] = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, help="Streams that run together.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per stream.")] = 400,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt of each stream.")] = 16,
    idle_s: Annotated[float, typer.Option(min=1.0, help="Seconds of rest to measure.")] = 10.0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """CPU per streamed token and per iteration by process; CPU while idle."""
    model = model or first_model(url, api_key)
    client = LoadClient(url, model, first_token=20, vocab=200, api_key=api_key)  # in any vocabulary
    with console.status("warming up") as status:
        _serve(client, [Job(0.0, 16, 16)] * 4)
        wait_until_idle()
        status.update(f"measuring the idle engine for {idle_s:g} s")
        meter = CpuMeter()
        time.sleep(idle_s)
        idle = meter.read()
        if "stage" not in idle.cpu_s:
            raise MeasurementError("nothing was measured: no Legato stage runs on this machine")

        # First without the feed, for CPU; then with it, for the gaps between steps.
        status.update(f"{streams} streams of {tokens} tokens, twice")
        jobs = [Job(0.0, prompt_tokens, tokens)] * streams
        meter = CpuMeter()
        traces = _serve(client, jobs)
        load = meter.read()
        gaps_s = gaps_between_steps(_records(url, client, jobs), streams)
    found = overhead_figures(idle, load, sum(t.num_tokens for t in traces), gaps_s)
    publish(make_report(context, found, {"model": model}), as_json, out)
    if not as_json:
        _print(streams, found)


def overhead_figures(
    idle: CpuUsage, load: CpuUsage, num_tokens: int, gaps_s: Sequence[float]
) -> dict[str, Any]:
    """CPU per token: the processes' use beyond the idle engine's share of the span."""
    extra_s = {
        kind: load.cpu_s[kind] - idle.percent(kind) / 100 * load.span_s for kind in load.cpu_s
    }
    outside_s = sum(cpu_s for kind, cpu_s in extra_s.items() if kind != "stage")
    outside_percent = sum(load.percent(kind) for kind in load.cpu_s if kind != "stage")
    enough = len(gaps_s) >= 2
    p90_s = statistics.quantiles(gaps_s, n=10)[-1] if enough else math.nan
    return {
        "num_tokens": num_tokens,
        "span_s": load.span_s,
        "cpu_us_per_token": {k: 1e6 * v / num_tokens for k, v in extra_s.items()},
        "cpu_us_per_token_outside_stage": 1e6 * outside_s / num_tokens,
        "gap_between_steps_ms_p50": 1e3 * statistics.median(gaps_s) if enough else math.nan,
        "gap_between_steps_ms_p90": 1e3 * p90_s,
        "load_percent_of_one_core": load.percents(),
        "load_percent_of_one_core_outside_stage": outside_percent,
        "idle_percent_of_one_core": idle.percents(),
        "idle": asdict(idle),
    }


def gaps_between_steps(records: Sequence[dict[str, Any]], num_streams: int) -> list[float]:
    """Seconds between the end of a full step and the begin of the next, on the first stage.

    records: iterations in order, as the console's feed has them. A full step decodes every stream,
    with drafts or without.
    """
    full = [r for r in records if r["num_requests"] == num_streams and r["num_prefill_tokens"] == 0]
    return [
        later["stages_s"][0][0] - earlier["stages_s"][0][1]
        for earlier, later in itertools.pairwise(full)
        if later["step"] == earlier["step"] + 1
    ]


def _serve(client: LoadClient, jobs: list[Job]) -> list[Trace]:
    traces = asyncio.run(client.run(jobs))
    if error := next((t.error for t in traces if t.error), None):
        raise MeasurementError(f"nothing was measured: a stream failed ({error})")
    if not any(t.num_tokens for t in traces):
        raise MeasurementError("nothing was measured: the server counted no tokens")
    return traces


def _records(url: str, client: LoadClient, jobs: list[Job]) -> list[dict[str, Any]]:
    """The iterations of a run of these jobs; those that came, where the feed ends early."""
    watches = threading.Event()
    records: list[dict[str, Any]] = []

    def read() -> None:
        try:
            for batch in _feed(server_root(url), client.headers, watches):
                records.extend(batch)
                # The engine runs on this machine, so its clock is this one.
                if batch[-1]["submitted_s"] > ended_s:
                    return
        except httpx.HTTPError as error:
            console.print(f"the console's feed gives no gaps between steps: {error}", markup=False)
        finally:
            watches.set()

    ended_s = math.inf
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    watches.wait(30)
    _serve(client, jobs)
    ended_s = time.monotonic()
    _serve(client, jobs[:1])  # an iteration after those, so that the reader sees that it has all
    reader.join(30)
    return records


def _feed(
    root: str, headers: Mapping[str, str], watches: threading.Event
) -> Iterator[list[dict[str, Any]]]:
    """Batches of iterations as they come; sets `watches` once none is missed."""
    trusted = ssl.create_default_context()
    with httpx.stream(
        "GET", f"{root}/console/feed", timeout=30, headers=headers, trust_env=False, verify=trusted
    ) as answer:
        answer.raise_for_status()
        watches.set()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))["iterations"]


def _print(streams: int, found: dict[str, Any]) -> None:
    idle, busy = found["idle_percent_of_one_core"], found["load_percent_of_one_core"]
    rows = [
        (kind, f"{us:.1f}", f"{busy[kind]:.1f}", f"{idle.get(kind, 0.0):.1f}")
        for kind, us in sorted(found["cpu_us_per_token"].items(), key=lambda item: -item[1])
    ]
    columns = ("process", "us CPU per token", "% of a core", "% of a core idle")
    output.print(table(f"{streams} streams", columns, rows))
    output.print(
        f"outside the stages {found['cpu_us_per_token_outside_stage']:.1f} us per token, "
        f"{found['load_percent_of_one_core_outside_stage']:.1f} % of a core while they compute; "
        f"gap between steps {found['gap_between_steps_ms_p50']:.2f} ms (median), "
        f"{found['gap_between_steps_ms_p90']:.2f} ms (P90)"
    )
