"""`legato bench batch`: a batch in the slack of a live load.

Three parts in turn: the live load alone, the batch alone, and the batch while the live load goes
on. What the live load leaves is the share of time in which the engine runs no step for it.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer

from app.bench.load.client import (
    Job,
    LoadClient,
    Trace,
    authorization,
    first_model,
    server_root,
)
from app.bench.load.figures import LoadFigures, load_figures
from app.bench.load.serve import DEFAULT_URL, ApiKey, Model, Qps, Seconds, Url
from app.bench.load.workload import LengthsOption, Load
from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, console, output, say_duration, table
from app.paths import own_command, own_environment

_BUSY: Final = "legato_iteration_seconds_sum"
_TOKENS: Final = range(300, 4000)


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """live_alone, live_beside: the live load without the batch and while it runs.

    busy_share: of the time of the live load alone, that in which a step runs.
    alone_qps, beside_qps: requests of the batch answered per second, without and beside that load.
    """

    live_alone: LoadFigures
    live_beside: LoadFigures
    busy_share: float
    alone_qps: float
    beside_qps: float

    @property
    def left_qps(self) -> float:
        """The batch's own rate, times the share of time that the live load leaves."""
        return self.alone_qps * (1.0 - self.busy_share)

    def to_dict(self) -> dict[str, Any]:
        return {
            "live_alone": self.live_alone.to_dict(),
            "live_beside": self.live_beside.to_dict(),
            "busy_share": self.busy_share,
            "batch_alone_qps": self.alone_qps,
            "batch_left_qps": self.left_qps,
            "batch_beside_qps": self.beside_qps,
            "of_what_is_left": self.beside_qps / self.left_qps if self.left_qps > 0 else None,
        }


def batch_lines(jobs: Sequence[Job], model: str, seed: int | None = None) -> str:
    """A file of these requests for `legato batch`; seed None: every prompt is new."""
    chance = random.Random(seed)
    bodies = (
        {
            "model": model,
            "prompt": chance.choices(_TOKENS, k=job.num_prompt_tokens),
            "max_tokens": job.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for job in jobs
    )
    lines = (
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


async def run_batch(url: str, lines: str, folder: Path, api_key: str | None = None) -> float:
    """Requests that `legato batch` answers per second. Raises MeasurementError if one fails."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text(lines)
    target.unlink(missing_ok=True)
    command = own_command("app.cli.main", "batch", str(source), str(target), "--json")
    process = await asyncio.create_subprocess_exec(
        *(*command, "--url", url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=own_environment() | ({"LEGATO_API_KEY": api_key} if api_key else {}),
    )
    try:
        printed, problem = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode != 0:
        raise MeasurementError(f"the batch failed: {problem.decode()[-500:] or printed.decode()}")
    return rate_of(json.loads(printed))


def rate_of(totals: Mapping[str, Any]) -> float:
    """Requests per second from the totals that `legato batch --json` prints."""
    if not totals["num_done"] or totals["num_failed"]:
        raise MeasurementError(f"the batch was not answered whole: {json.dumps(totals)}")
    return float(totals["num_done"] / totals["seconds"])


async def run_beside(
    client: LoadClient,
    jobs: Sequence[Job],
    url: str,
    lines: str,
    folder: Path,
    api_key: str | None = None,
) -> tuple[list[Trace], float]:
    """Live requests that arrive while the batch runs, and the batch's requests per second."""
    done = asyncio.Event()
    live = asyncio.create_task(client.run(jobs, until=done))
    try:
        rate = await run_batch(url, lines, folder, api_key)
    finally:
        done.set()
        traces = await live
    return traces, rate


def busy_seconds(metrics: str) -> float:
    """Total time of steps by a server's `/metrics`. Raises MeasurementError where none tell."""
    values = [
        float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(_BUSY)
    ]
    if not values:
        raise MeasurementError(f"the server's /metrics have no {_BUSY}")
    return sum(values)


def _busy_seconds(url: str, api_key: str | None) -> float:
    headers = authorization(api_key)
    try:
        answer = httpx.get(f"{server_root(url)}/metrics", timeout=10, headers=headers)
        return busy_seconds(answer.text)
    except httpx.HTTPError as error:
        raise MeasurementError(f"{server_root(url)}/metrics: {error}") from error


def command(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Model = None,
    qps: Qps = 2.0,
    seconds: Seconds = 30.0,
    lengths: LengthsOption = "sharegpt/8",
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of the batch.")] = 500,
    batch_lengths: LengthsOption = "sharegpt/8",
    tbt_ms: Annotated[float, typer.Option(min=1.0, help="Objective to judge by.")] = 100.0,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """A batch beside a live load on one engine: what it costs and how fast it is."""
    model = model or first_model(url, api_key)
    client = LoadClient(url, model, api_key=api_key)
    batch_jobs = Load(batch_lengths, 1.0, num_requests, seed=seed + 1).jobs()
    lines = batch_lines(batch_jobs, model)
    say_duration(seconds + num_requests / 10, seconds + num_requests, "three parts")
    with tempfile.TemporaryDirectory(prefix="legato-batch-") as name:
        folder = Path(name)
        with console.status("the live load alone"):
            busy_s = _busy_seconds(url, api_key)
            alone = load_figures(
                asyncio.run(client.run(Load(lengths, qps, seconds, seed=seed).jobs())),
                tbt_ms=tbt_ms,
            )
            alone.check_measured()
            busy_s = _busy_seconds(url, api_key) - busy_s
        with console.status("the batch alone"):
            alone_qps = asyncio.run(run_batch(url, lines, folder, api_key))
        busy_share = min(1.0, busy_s / alone.span_s)
        most_s = 10 * num_requests / alone_qps / max(1.0 - busy_share, 0.1)
        live = Load(lengths, qps, most_s, seed=seed).jobs()
        with console.status("both"):
            traces, beside_qps = asyncio.run(
                run_beside(client, live, url, batch_lines(batch_jobs, model), folder, api_key)
            )
    beside = load_figures(traces, tbt_ms=tbt_ms)
    beside.check_measured()
    found = BatchFigures(alone, beside, busy_share, alone_qps, beside_qps)
    publish(make_report(context, found.to_dict(), {"model": model}), as_json, out)
    if not as_json:
        _print(found)


def _print(found: BatchFigures) -> None:
    columns = ("live load", "requests", "failed", "TTFT P50", "TBT P50", "P99", "max", "stalls")
    rows = [
        (
            *(name, str(f.num_requests), str(f.num_failed), f"{f.ttft_p50_ms:.0f}"),
            *(f"{f.tbt_p50_ms:.0f}", f"{f.tbt_p99_ms:.0f}", f"{f.tbt_max_ms:.0f}"),
            str(f.num_stalls),
        )
        for name, f in (("alone", found.live_alone), ("beside", found.live_beside))
    ]
    output.print(table("seen by the client; times in ms", columns, rows))
    output.print(
        f"batch: {found.alone_qps:.2f} requests/s alone, {found.beside_qps:.2f} beside; the live "
        f"load keeps the engine busy {found.busy_share:.0%} of its time and so leaves "
        f"{found.left_qps:.2f}"
    )
