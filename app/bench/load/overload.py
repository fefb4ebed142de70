"""`legato bench overload`: objectives that a server keeps under more load than it can serve.

Loads run in turn, at multiples of one rate; every request states its objectives. A server may
refuse a request, but accepting one is a promise to keep them. A refusal that comes after the first
token was due is a promise that was not kept.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from app.bench.load.client import LoadClient, Trace, first_model
from app.bench.load.figures import LoadFigures, exit_if_failed, load_figures
from app.bench.load.serve import DEFAULT_URL, ApiKey, Model, Seconds, Url
from app.bench.load.workload import LengthsOption, Load
from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, console, numbers, output, say_duration, table
from app.telemetry.definitions import kept_objectives

REFUSED = "429"


@dataclass(frozen=True, slots=True)
class Overload:
    """One load. Shares: refused, of all requests; kept, of the accepted requests: first token and
    all gaps were in time; gaps_kept, of all gaps of the accepted requests. They are nan of none.

    num_failed: accepted requests that met an error or ended early, and so were not kept.
    first_error: of these.

    goodput_tokens_per_s: prompt and output tokens of the requests that kept both. The more requests
    there are to choose from, the shorter are those that fit, and the more of them fit: goodput in
    requests grows beyond what the machine can do more.
    """

    times: float
    num_requests: int
    num_failed: int
    refused_share: float
    kept_share: float
    gaps_kept_share: float
    goodput_tokens_per_s: float
    accepted: LoadFigures
    first_error: str | None
    first_refusal: str | None

    def to_dict(self) -> dict[str, Any]:
        return {
            **{n: getattr(self, n) for n in self.__slots__},
            "accepted": self.accepted.to_dict(),
        }


def overload_figures(
    traces: Sequence[Trace], times: float, tbt_ms: float, ttft_ms: float
) -> Overload:
    accepted = [t for t in traces if not _was_refused(t, ttft_ms)]
    figures = load_figures(accepted, tbt_ms=tbt_ms, ttft_ms=ttft_ms)
    failed = [t for t in accepted if not t.finished and not _is_refusal(t)]
    kept = [
        t.finished
        and t.ttft_s is not None
        and kept_objectives(
            t.ttft_s,
            max(t.gaps_s, default=0.0),
            ttft_objective_s=ttft_ms / 1000,
            tbt_objective_s=tbt_ms / 1000,
        )
        for t in accepted
    ]
    gaps_kept = [gap_s <= tbt_ms / 1000 for t in accepted for gap_s in t.gaps_s]
    tokens = sum(
        t.job.num_prompt_tokens + t.num_tokens
        for t, is_kept in zip(accepted, kept, strict=True)
        if is_kept
    )
    return Overload(
        times,
        len(traces),
        len(failed),
        refused_share=1.0 - len(accepted) / len(traces),
        kept_share=_share(kept),
        gaps_kept_share=_share(gaps_kept),
        goodput_tokens_per_s=tokens / figures.span_s if figures.span_s else 0.0,
        accepted=figures,
        first_error=failed[0].problem if failed else None,
        first_refusal=next((t.error for t in traces if _is_refusal(t)), None),
    )


def _share(held: Sequence[bool]) -> float:
    return sum(held) / len(held) if held else math.nan


def _is_refusal(trace: Trace) -> bool:
    return trace.error is not None and trace.error.startswith(REFUSED)


def _was_refused(trace: Trace, ttft_ms: float) -> bool:
    """Soon enough: a later refusal is a promise that was not kept."""
    if not _is_refusal(trace):
        return False
    return trace.refused_s is None or trace.refused_s - trace.job.arrival_s <= ttft_ms / 1000


def command(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Model = None,
    qps: Annotated[float, typer.Option(min=0.01, help="Load that the server can serve.")] = 4.0,
    times: Annotated[str, typer.Option(help="Multiples of it, comma separated.")] = "1,3,10",
    seconds: Seconds = 20.0,
    lengths: LengthsOption = "sharegpt/8",
    tbt_ms: Annotated[float, typer.Option(min=1.0, help="TBT objective of each request.")] = 100.0,
    ttft_ms: Annotated[
        float, typer.Option(min=1.0, help="TTFT objective of each request.")
    ] = 2000.0,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Goodput and kept objectives at multiples of a load that the server can serve."""
    factors = numbers(times, "--times", float)
    model = model or first_model(url, api_key)
    client = LoadClient(
        url, model, extra={"slo": {"tbt_ms": tbt_ms, "ttft_ms": ttft_ms}}, api_key=api_key
    )
    say_duration(len(factors) * seconds, 2 * len(factors) * seconds, f"{len(factors)} loads")
    found = []
    for factor in factors:
        jobs = Load(lengths, factor * qps, seconds, seed=seed).jobs()
        with console.status(f"{factor * qps:g} requests/s"):
            traces = asyncio.run(client.run(jobs))
        found.append(overload_figures(traces, factor, tbt_ms, ttft_ms))
        if found[0].num_failed:  # by a wrong model, say: nor would the others measure anything
            found[0].accepted.check_measured()
    figures = {"loads": [one.to_dict() for one in found]}
    publish(make_report(context, figures, {"model": model}), as_json, out)
    if not as_json:
        _print(found)
    failed = [one for one in found if one.num_failed]
    if failed:
        exit_if_failed(sum(one.num_failed for one in failed), failed[0].first_error)
    if all(one.refused_share == 1.0 for one in found):
        raise MeasurementError(f"every request was refused ({found[0].first_refusal})")


def _print(found: Sequence[Overload]) -> None:
    best = max(one.goodput_tokens_per_s for one in found)
    columns = ["load", "asked", "refused", "failed", "kept", "gaps", "TBT", "TTFT", "req/s",
               "tok/s", "best"]  # fmt: skip
    rows = []
    for one in found:
        seen = one.accepted
        cells = (
            f"{one.times:g} x", str(one.num_requests), f"{one.refused_share:.0%}",
            str(one.num_failed), f"{one.kept_share:.1%}", f"{one.gaps_kept_share:.2%}",
            f"{seen.tbt_p99_ms:.0f}", f"{seen.ttft_p99_ms:.0f}", f"{seen.goodput_qps:.2f}",
            f"{one.goodput_tokens_per_s:.0f}",
            f"{one.goodput_tokens_per_s / best:.2f}" if best else "-",
        )  # fmt: skip
        rows.append(["-" if cell.startswith("nan") else cell for cell in cells])
    title = (
        "kept requests and gaps, of the accepted; TBT and TTFT at P99, in ms, seen by the client; "
        "goodput in requests and tokens, and its share of the best in tokens"
    )
    output.print(table(title, columns, rows, num_words=0))
