"""`legato bench serve` and `legato capacity`: load any OpenAI URL, and find what it can hold."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from app.bench.load.client import Job, LoadClient, jobs_of
from app.bench.load.measure import Report, report
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import (
    Lengths,
    arxiv_summarization,
    fixed_lengths,
    scaled,
    sharegpt4,
)
from app.simulate.workload.requests import generate

_err = Console(stderr=True, highlight=False)
MEDIAN_TTFT_LIMIT_MS = 2000.0

Url = Annotated[str, typer.Option(help="Root of any OpenAI-compatible server.")]
Model = Annotated[str | None, typer.Option(help="Model name; the server's first if absent.")]
LengthsOption = Annotated[
    str, typer.Option(help="sharegpt, arxiv, either with /DIVISOR, or PROMPTxOUTPUT tokens.")
]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable results.")]
Out = Annotated[Path | None, typer.Option(help="Write the JSON report here too.")]


def lengths_of(name: str) -> Lengths:
    """Raises typer.BadParameter for a name it does not know."""
    kind, _, divisor = name.partition("/")
    if kind in ("sharegpt", "arxiv"):
        lengths = sharegpt4() if kind == "sharegpt" else arxiv_summarization()
        return scaled(lengths, float(divisor)) if divisor else lengths
    prompt, _, output = name.partition("x")
    if prompt.isdigit() and output.isdigit():
        return fixed_lengths(int(prompt), int(output))
    raise typer.BadParameter(f"{name!r}: use sharegpt, arxiv, sharegpt/8 or 512x64")


def first_model(url: str) -> str:
    try:
        data = httpx.get(f"{url.rstrip('/')}/v1/models", timeout=10).json()
        return str(data["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise typer.BadParameter(f"no model list at {url}: {error}") from error


def bench_serve(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    qps: Annotated[float, typer.Option(min=0.01, help="Poisson arrivals per second.")] = 2.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="Length of the arrivals.")] = 40.0,
    lengths: LengthsOption = "sharegpt/8",
    tbt_ms: Annotated[float | None, typer.Option(help="Objective to judge by.")] = None,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Open-loop Poisson load: TTFT, TBT, stalls, goodput."""
    client = LoadClient(url, model or first_model(url))
    result = run_load(client, lengths_of(lengths), qps, seconds, tbt_ms=tbt_ms, seed=seed)
    publish(result.to_dict(), as_json, out)
    if not as_json:
        _err.print(_table([result]))
    if result.num_failed:
        _err.print(f"[red]{result.num_failed} requests failed:[/] {result.first_error}")
        raise typer.Exit(1)


def run_load(
    client: LoadClient,
    lengths: Lengths,
    qps: float,
    seconds: float,
    *,
    tbt_ms: float | None = None,
    seed: int = 0,
) -> Report:
    workload = generate(poisson(qps), lengths, max(2, math.ceil(qps * seconds)), seed=seed)
    jobs = jobs_of(workload)
    with Progress(console=_err, transient=True) as progress:
        task = progress.add_task(f"{qps:.2f} requests/s", total=len(jobs))
        traces = asyncio.run(client.run(jobs, lambda _: progress.advance(task)))
    return report(traces, tbt_ms=tbt_ms)


@dataclass(frozen=True, slots=True)
class Limits:
    """A load passes when P99 TBT and the median TTFT stay within these and nothing fails."""

    tbt_ms: float
    ttft_p50_ms: float = MEDIAN_TTFT_LIMIT_MS

    def passed(self, r: Report) -> bool:
        return r.num_failed == 0 and self.hold(r.tbt_p99_ms, r.ttft_p50_ms)

    def hold(self, tbt_p99_ms: float, ttft_p50_ms: float) -> bool:
        return tbt_p99_ms <= self.tbt_ms and ttft_p50_ms <= self.ttft_p50_ms


def bisect(guess_qps: float, tolerance: float) -> Generator[float, bool, float]:
    """The search for a capacity: yields a load to try, is sent whether it passed, and returns the
    highest that did; bracketed in strides, then bisected."""
    low, high, qps = 0.0, math.inf, guess_qps
    while high - low > tolerance * high or high == math.inf:
        low, high = (qps, high) if (yield qps) else (low, qps)
        if low == 0.0 and high < 0.05:
            break
        # An overloaded probe takes long to drain, so the way up is in smaller strides.
        qps = qps * 1.5 if high == math.inf else (low + high) / 2 if low else high / 2
    return low


def bisected(guess_qps: float, tolerance: float, passes: Callable[[float], bool]) -> float:
    """The capacity by `bisect`, where a load can be judged without awaiting anything."""
    loads = bisect(guess_qps, tolerance)
    qps = next(loads)
    while True:
        try:
            qps = loads.send(passes(qps))
        except StopIteration as found:
            return float(found.value)


def search(
    client: LoadClient,
    lengths: Lengths,
    limits: Limits,
    *,
    guess_qps: float,
    seconds: float,
    tolerance: float,
    seed: int = 0,
) -> tuple[float, list[Report]]:
    """Highest passing load and what was seen on the way; the same requests throughout."""
    probes: list[Report] = []

    def passes(qps: float) -> bool:
        result = run_load(client, lengths, qps, seconds, tbt_ms=limits.tbt_ms, seed=seed)
        probes.append(result)
        say_probe(qps, result, limits)
        return limits.passed(result)

    return bisected(guess_qps, tolerance, passes), probes


def say_probe(qps: float, result: Report, limits: Limits) -> None:
    _err.print(
        f"  {qps:6.2f} requests/s  P99 TBT {result.tbt_p99_ms:7.1f} ms  "
        f"median TTFT {result.ttft_p50_ms:7.0f} ms  {'ok' if limits.passed(result) else 'over'}"
    )


def capacity(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    tbt_ms: Annotated[float, typer.Option(min=1.0, help="P99 TBT objective.")] = 100.0,
    lengths: LengthsOption = "sharegpt/8",
    guess_qps: Annotated[float, typer.Option(min=0.05)] = 4.0,
    seconds: Annotated[float, typer.Option(min=5.0, help="Arrivals of one probe.")] = 40.0,
    tolerance: Annotated[float, typer.Option(min=0.005, max=0.5)] = 0.05,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """The highest Poisson QPS a running server sustains under a P99 TBT objective."""
    client = LoadClient(url, model or first_model(url))
    run_load(client, lengths_of(lengths), min(guess_qps, 1.0), 5.0, seed=seed)  # warm up
    qps, probes = search(
        client,
        lengths_of(lengths),
        Limits(tbt_ms),
        guess_qps=guess_qps,
        seconds=seconds,
        tolerance=tolerance,
        seed=seed,
    )
    publish(
        {"capacity_qps": qps, "tbt_ms": tbt_ms, "probes": [p.to_dict() for p in probes]},
        as_json,
        out,
    )
    if not as_json:
        _err.print(_table(sorted(probes, key=lambda p: p.qps_offered)))
        _err.print(f"[bold]capacity {qps:.2f} requests/s[/] at P99 TBT <= {tbt_ms:g} ms")


def stall_probe(client: LoadClient, streams: int, prompt_tokens: int) -> dict[str, Any]:
    """The longest gaps of running streams while a long prompt is prefilled."""
    jobs = [Job(0.02 * i, 64, 400) for i in range(streams)] + [Job(1.0, prompt_tokens, 4)]
    traces = asyncio.run(client.run(jobs))
    gaps = [1000 * max(t.gaps_s, default=0.0) for t in traces[:streams]]
    return {
        "streams": streams,
        "prompt_tokens": prompt_tokens,
        "longest_tbt_ms": max(gaps),
        "median_longest_tbt_ms": sorted(gaps)[len(gaps) // 2],
        "ttft_of_long_prompt_ms": 1000 * (traces[-1].ttft_s or math.nan),
        "error": next((t.error for t in traces if t.error), None),
    }


def stall(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1)] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 3000,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """The longest gap that running streams suffer when a long prompt arrives."""
    result = stall_probe(LoadClient(url, model or first_model(url)), streams, prompt_tokens)
    publish(result, as_json, out)
    if not as_json:
        _err.print(
            f"longest TBT of {streams} streams {result['longest_tbt_ms']:.0f} ms; the "
            f"{prompt_tokens}-token prompt's first token after "
            f"{result['ttft_of_long_prompt_ms']:.0f} ms"
        )


def publish(result: dict[str, Any], as_json: bool, out: Path | None) -> None:
    text = json.dumps(result, indent=2)
    if as_json:
        typer.echo(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


def _table(reports: list[Report]) -> Table:
    table = Table(title="seen by the client; times in ms", title_justify="left")
    for column in ("QPS", "TTFT P50", "TTFT P99", "TBT P50", "TBT P99", "TBT max", "tokens/s",
                   "failed"):  # fmt: skip
        table.add_column(column, justify="right")
    for r in reports:
        values = (r.ttft_p50_ms, r.ttft_p99_ms, r.tbt_p50_ms, r.tbt_p99_ms, r.tbt_max_ms,
                  r.output_tokens_per_s, r.num_failed)  # fmt: skip
        table.add_row(f"{r.qps_offered:.2f}", *[f"{v:.0f}" for v in values])
    return table


def register(bench: typer.Typer, app: typer.Typer) -> None:
    bench.command("serve")(bench_serve)
    bench.command("stall")(stall)
    app.command("capacity")(capacity)
