"""`legato bench quote`: a server's quotes (`/v1/slo/quote`) compared with its behavior.

Before each request of an open-loop load the client asks for a quote, then sends the request
regardless of the answer. A refused request is sent again after the quoted retry_after_s, and if
refused again, once more after a further quarter of that time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.bench.load.client import Job, LoadClient, Trace, error_message, first_model, open_loop
from app.bench.load.figures import exit_if_failed
from app.bench.load.serve import DEFAULT_URL, ApiKey, Model, Qps, Seconds, Url
from app.bench.load.workload import LengthsOption, Load
from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, console, output, say_duration, table
from app.telemetry.definitions import quantile

if TYPE_CHECKING:
    import aiohttp

NEAR = 0.25  # a figure counts as true within this share
REFUSED = "429"


@dataclass(slots=True)
class Attempt:
    """One quote and its request. ask_s: time until the quote arrived."""

    said: dict[str, Any]
    ask_s: float
    trace: Trace

    @property
    def refused(self) -> bool:
        return (self.trace.error or "").startswith(REFUSED)

    @property
    def ttft_s(self) -> float | None:
        """TTFT from sending, not from the job's arrival, which precedes the quote."""
        times = self.trace.event_times_s
        return times[0] - self.trace.sent_s if times else None


@dataclass(slots=True)
class Asked:
    """A job and its attempts: the first, one after Retry-After and one later."""

    attempts: list[Attempt] = field(default_factory=list)


class QuotedLoad:
    """slo: the objective of quotes and requests, as in their bodies."""

    def __init__(self, client: LoadClient, slo: dict[str, float]) -> None:
        self._client = client
        self._slo = slo

    async def run(self, jobs: Sequence[Job]) -> list[Asked]:
        found = [Asked() for _ in jobs]
        async with self._client.session() as session:

            async def send(number: int, begin_s: float) -> Trace:
                return await self._one(session, jobs[number], found[number], begin_s)

            await open_loop(jobs, send)
        return found

    async def _one(
        self, session: aiohttp.ClientSession, job: Job, asked: Asked, begin_s: float
    ) -> Trace:
        body = self._client.body(job)  # who returns asks the same again
        first = await self._attempt(session, job, asked, begin_s, body)
        retry_s = first.said["retry_after_s"]
        if not first.refused or retry_s is None:
            return first.trace
        refused_s = time.perf_counter()
        attempt = first
        for factor in (1.0, 1.0 + NEAR):
            if attempt.refused:
                await asyncio.sleep(refused_s + factor * retry_s - time.perf_counter())
                attempt = await self._attempt(session, job, asked, begin_s, body)
        return attempt.trace

    async def _attempt(
        self,
        session: aiohttp.ClientSession,
        job: Job,
        asked: Asked,
        begin_s: float,
        body: bytes,
    ) -> Attempt:
        ask_s = time.perf_counter()
        said = await self._quote(session, job)
        ask_s = time.perf_counter() - ask_s
        trace = await self._client.send(session, job, begin_s, body=body)
        attempt = Attempt(said, ask_s, trace)
        asked.attempts.append(attempt)
        return attempt

    async def _quote(self, session: aiohttp.ClientSession, job: Job) -> dict[str, Any]:
        body = {
            "prompt_tokens": job.num_prompt_tokens,
            "max_tokens": job.num_output_tokens,
            "slo": self._slo,
        }
        url, headers = self._client.root + "/v1/slo/quote", self._client.headers
        async with session.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                why = error_message(await response.text())
                raise MeasurementError(f"no quote: {response.status}: {why}")
            said: dict[str, Any] = await response.json()
        if said["predicted"] is None and said["can_serve_now"] is None:
            raise MeasurementError(f"no quote: {said['reason']}")
        return said


def quote_figures(found: Sequence[Asked], ttft_ms: float | None) -> dict[str, Any]:
    """Ratios are quoted / measured. Raises MeasurementError if no quoted request had a first token.

    kept_bound_share: first tokens no later than the quote's bound; kept_share: than the objective
    (without one: the bound). yes_kept_share: of first quotes that said "now", requests whose first
    token kept it. no_true_share: of the other first quotes, requests refused or late.
    retry_true_share: of refused requests, those accepted after Retry-After; retry_near_share: then,
    or a quarter later.
    """
    attempts = [attempt for asked in found for attempt in asked.attempts]
    ratios, kept, in_times, verdicts = [], [], list[bool](), list[tuple[bool, bool]]()
    for number, attempt in [one for asked in found for one in enumerate(asked.attempts)]:
        predicted, ttft_s = attempt.said["predicted"], attempt.ttft_s
        if predicted is None or (ttft_s is None and not attempt.refused):
            continue
        in_time = False
        if ttft_s is not None:
            ratios.append(predicted["ttft_ms"] / (1000 * ttft_s))
            kept.append(1000 * ttft_s <= predicted["ttft_bound_ms"])
            in_time = 1000 * ttft_s <= (ttft_ms or predicted["ttft_bound_ms"])
            in_times.append(in_time)
        if not number:  # who returns has a place, of which a quote knows nothing
            verdicts.append((attempt.said["can_serve_now"], in_time))
    if not ratios:
        why = next((a.trace.error for a in attempts if a.trace.error), "no request was answered")
        raise MeasurementError(f"nothing was measured: {why}")
    ratios.sort()
    failed = [a.trace for a in attempts if not a.trace.finished and not a.refused]
    retried = [asked.attempts for asked in found if len(asked.attempts) > 1]
    return {
        "num_requests": len(found),
        "num_quotes": len(attempts),
        "num_refused": sum(asked.attempts[0].refused for asked in found),
        "num_failed": len(failed),
        "first_error": failed[0].problem if failed else None,
        "ask_p50_ms": 1000 * quantile(sorted(a.ask_s for a in attempts), 0.5),
        "ttft_p50_ms": 1000 * quantile(sorted(a.ttft_s for a in attempts if a.ttft_s), 0.5),
        "ttft_ratio_p10": quantile(ratios, 0.1),
        "ttft_ratio_p50": quantile(ratios, 0.5),
        "ttft_ratio_p90": quantile(ratios, 0.9),
        "ttft_near_share": _share([abs(ratio - 1.0) <= NEAR for ratio in ratios]),
        "kept_bound_share": _share(kept),
        "kept_share": _share(in_times),
        "yes_kept_share": _share([in_time for now, in_time in verdicts if now]),
        "no_true_share": _share([not in_time for now, in_time in verdicts if not now]),
        "num_retried": len(retried),
        "retry_true_share": _share([not tries[1].refused for tries in retried]),
        "retry_near_share": _share([not tries[-1].refused for tries in retried]),
    }


def _share(held: Sequence[bool]) -> float | None:
    return sum(held) / len(held) if held else None


def command(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Model = None,
    qps: Qps = 2.0,
    seconds: Seconds = 40.0,
    lengths: LengthsOption = "sharegpt/8",
    tbt_ms: Annotated[float | None, typer.Option(min=1.0, help="TBT objective to ask for.")] = None,
    ttft_ms: Annotated[
        float | None, typer.Option(min=1.0, help="TTFT objective to ask for.")
    ] = None,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """The server's quotes compared with measurements: TTFT, refusals, Retry-After."""
    model = model or first_model(url, api_key)
    given = {"tbt_ms": tbt_ms, "ttft_ms": ttft_ms}
    slo = {name: value for name, value in given.items() if value is not None}
    client = LoadClient(url, model, extra={"slo": slo}, api_key=api_key)
    jobs = Load(lengths, qps, seconds, seed=seed).jobs()
    say_duration(seconds, 1.5 * seconds, f"{len(jobs)} requests, a quote before each")
    with console.status(f"{qps:g} requests/s"):
        found = asyncio.run(QuotedLoad(client, slo).run(jobs))
    figures = quote_figures(found, ttft_ms)
    publish(make_report(context, figures, {"model": model}), as_json, out)
    if not as_json:
        rows = [(name, "-" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v))
                for name, v in figures.items()]  # fmt: skip
        output.print(table("quotes against what happened", ("figure", "value"), rows))
    exit_if_failed(figures["num_failed"], figures["first_error"])
