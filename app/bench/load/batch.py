"""`legato bench batch`: a batch in the slack of a live load.

In turn and several times: the live load alone, the batch alone, and the batch while the live load
goes on. The live load is judged by the same requests in both, and what differs between its runs
alone is noise. What it leaves is the share of time in which the engine runs no step for it.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import httpx
import typer

from app.bench.load.client import (
    Job,
    LoadClient,
    Trace,
    ask,
    authorization,
    first_model,
    server_root,
)
from app.bench.load.figures import LoadFigures, exit_if_any_failed, load_figures
from app.bench.load.serve import DEFAULT_URL, ApiKey, Model, Qps, Seconds, Url
from app.bench.load.workload import LengthsOption, Load
from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, console, output, say_duration, table
from app.paths import own_command, own_environment

_BUSY: Final = "legato_iteration_seconds_sum"
_PIPELINE: Final = "legato_pipeline_bubble_seconds_total{"
_ENGINE: Final = "legato_engine_serving{"
_REPLICA: Final = 'replica="'  # a label that only replicas behind a proxy have
_TOKENS: Final = range(300, 4000)


@dataclass(frozen=True, slots=True)
class Round:
    """live_alone, live_beside: the same live requests without the batch and while it runs.

    busy_share: of the time of the live load alone, that in which a step runs.
    alone_qps, beside_qps: requests of the batch answered per second, without and beside that load.
    """

    live_alone: LoadFigures
    live_beside: LoadFigures
    busy_share: float
    alone_qps: float
    beside_qps: float

    @property
    def tbt_p99_ratio(self) -> float:
        """Of the live load, beside the batch and alone."""
        return self.live_beside.tbt_p99_ms / self.live_alone.tbt_p99_ms

    @property
    def left_qps(self) -> float:
        """The batch's own rate, times the share of time that the live load leaves."""
        return self.alone_qps * (1.0 - self.busy_share)

    @property
    def of_what_is_left(self) -> float:
        """The batch's rate beside the live load, as a share of what that leaves."""
        return self.beside_qps / self.left_qps

    def to_dict(self) -> dict[str, Any]:
        return {
            "live_alone": self.live_alone.to_dict(),
            "live_beside": self.live_beside.to_dict(),
            "tbt_p99_ratio": self.tbt_p99_ratio,
            "busy_share": self.busy_share,
            "batch_alone_qps": self.alone_qps,
            "batch_left_qps": self.left_qps,
            "batch_beside_qps": self.beside_qps,
            "of_what_is_left": self.of_what_is_left,
        }


def in_both(
    alone: Sequence[Trace], beside: Sequence[Trace]
) -> tuple[Sequence[Trace], Sequence[Trace]]:
    """The runs of one list of jobs, cut to the jobs that both have sent."""
    count = min(len(alone), len(beside))
    return alone[:count], beside[:count]


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
    """Total time of steps by a server's `/metrics`. Raises MeasurementError where none tell, or
    where that is no share of the time: stages and engines are busy at once, and add up; replicas
    behind a proxy may each answer one of two reads."""
    lines = metrics.splitlines()
    busy = [line for line in lines if line.startswith(_BUSY)]
    values = [float(line.rpartition(" ")[2]) for line in busy]
    if any(_REPLICA in line for line in busy):
        raise MeasurementError(
            "behind a proxy, each read of /metrics may be of another replica: set args.listen"
        )
    if any(line.startswith(_PIPELINE) for line in lines):
        raise MeasurementError("what a load leaves is known of one stage; this engine has several")
    if sum(line.startswith(_ENGINE) for line in lines) > 1:
        raise MeasurementError("what a load leaves is known of one engine; this server has several")
    if not values:
        raise MeasurementError(f"the server's /metrics have no {_BUSY}")
    return sum(values)


def _busy_seconds(url: str, api_key: str | None) -> float:
    headers = authorization(api_key)
    try:
        answer = ask(f"{server_root(url)}/metrics", 10, headers)
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
    rounds: Annotated[int, typer.Option(min=1, help="Runs without and with the batch.")] = 3,
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
    # Also where a tenth is left, the live load outlasts a batch of five requests per second.
    jobs = Load(lengths, qps, seconds + 2 * num_requests, seed=seed).jobs()
    measured = [job for job in jobs if job.arrival_s <= seconds] or jobs[:1]
    least_s, most_s = rounds * (seconds + num_requests / 10), rounds * (seconds + num_requests)
    say_duration(least_s, most_s, f"{rounds} rounds")
    found = list[Round]()
    with tempfile.TemporaryDirectory(prefix="legato-batch-") as name:
        folder = Path(name)
        for number in range(1, rounds + 1):
            with console.status(f"round {number}: the live load alone"):
                busy_s = _busy_seconds(url, api_key)
                alone = asyncio.run(client.run(measured))
                whole = load_figures(alone, tbt_ms=tbt_ms)
                whole.check_measured()
                busy_share = (_busy_seconds(url, api_key) - busy_s) / whole.span_s
                if busy_share >= 1.0:
                    raise MeasurementError("the live load leaves no time: choose a smaller --qps")
            with console.status(f"round {number}: the batch alone"):
                lines = batch_lines(batch_jobs, model)
                alone_qps = asyncio.run(run_batch(url, lines, folder, api_key))
            with console.status(f"round {number}: both"):
                lines = batch_lines(batch_jobs, model)
                beside, beside_qps = asyncio.run(
                    run_beside(client, jobs, url, lines, folder, api_key)
                )
            same = in_both(alone, beside)
            of_alone, of_beside = (load_figures(traces, tbt_ms=tbt_ms) for traces in same)
            of_beside.check_measured()
            found.append(Round(of_alone, of_beside, busy_share, alone_qps, beside_qps))
    result = {"rounds": [each.to_dict() for each in found], **medians(found)}
    publish(make_report(context, result, {"model": model}), as_json, out)
    if not as_json:
        _print(found)
    exit_if_any_failed(f for each in found for f in (each.live_alone, each.live_beside))


def medians(rounds: Sequence[Round]) -> dict[str, float]:
    """tbt_p99_noise: the largest P99 of the live load alone, as a multiple of the smallest."""
    alone_ms = [each.live_alone.tbt_p99_ms for each in rounds]
    return {
        "tbt_p99_ratio": median(each.tbt_p99_ratio for each in rounds),
        "tbt_p99_noise": max(alone_ms) / min(alone_ms),
        "of_what_is_left": median(each.of_what_is_left for each in rounds),
    }


def _print(rounds: Sequence[Round]) -> None:
    columns = ("live load", "requests", "failed", "TTFT P50", "TBT P50", "P99", "max", "batch/s")
    rows = []
    for each in rounds:
        for name, f, batch_qps in (
            ("alone", each.live_alone, each.left_qps),
            ("beside", each.live_beside, each.beside_qps),
        ):
            counts = (str(f.num_requests), str(f.num_failed), f"{f.ttft_p50_ms:.0f}")
            tbt = (f"{f.tbt_p50_ms:.0f}", f"{f.tbt_p99_ms:.0f}", f"{f.tbt_max_ms:.0f}")
            rows.append((name, *counts, *tbt, f"{batch_qps:.2f}"))
    output.print(table("seen by the client; times in ms; batch/s: left, and had", columns, rows))
    found = medians(rounds)
    output.print(
        f"P99 TBT of the live load beside the batch is {found['tbt_p99_ratio']:.2f} times alone; "
        f"alone, it differs {found['tbt_p99_noise']:.2f} times between rounds. The batch has "
        f"{found['of_what_is_left']:.2f} of what the live load leaves. Medians of the rounds."
    )
