"""`legato bench stall`: the longest gap of running streams when a long prompt arrives."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Annotated, Any

import typer

from app.bench.load.client import Job, LoadClient, Trace, first_model
from app.bench.load.serve import DEFAULT_URL, ApiKey, Model, Url
from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, console, output

STREAM_TOKENS = 400
STREAM_PROMPT_TOKENS, LONG_OUTPUT_TOKENS = 64, 4
STAGGER_S = 0.02  # between the streams' arrivals
PATIENCE_S = 10.0  # wait for streams to start; a server may limit their number
POLL_S = 0.02


def measure_stall(
    client: LoadClient, streams: int, prompt_tokens: int, stream_tokens: int = STREAM_TOKENS
) -> dict[str, Any]:
    """Streams of 64 + `stream_tokens` tokens, and one prompt that arrives once all of them run.

    Raises MeasurementError if a request failed, or no stream was running when the prompt arrived.
    """
    return stall_figures(
        asyncio.run(_streams_and_prompt(client, streams, prompt_tokens, stream_tokens))
    )


async def _streams_and_prompt(
    client: LoadClient, streams: int, prompt_tokens: int, stream_tokens: int
) -> list[Trace]:
    """The streams' traces, followed by the long prompt's."""
    begin_s = time.perf_counter()
    tasks: list[asyncio.Task[Trace]] = []
    sent: list[Trace] = []
    async with client.session() as session:

        def send(num_prompt_tokens: int, num_output_tokens: int) -> None:
            job = Job(time.perf_counter() - begin_s, num_prompt_tokens, num_output_tokens)
            tasks.append(asyncio.create_task(client.send(session, job, begin_s, sent.append)))

        for _ in range(streams):
            send(STREAM_PROMPT_TOKENS, stream_tokens)
            await asyncio.sleep(STAGGER_S)
        patient_until_s = time.perf_counter() + PATIENCE_S
        while time.perf_counter() < patient_until_s and not any(task.done() for task in tasks):
            if len(sent) == streams and all(trace.event_times_s for trace in sent):
                break
            await asyncio.sleep(POLL_S)
        send(prompt_tokens, LONG_OUTPUT_TOKENS)
        return await asyncio.gather(*tasks)


def stall_figures(traces: list[Trace]) -> dict[str, Any]:
    """Figures of the streams' traces, followed by the long prompt's. Raises as `measure_stall`."""
    *streams, long = traces
    if error := next((t.error for t in traces if t.error), None):
        raise MeasurementError(f"nothing was measured: a request failed ({error})")
    if not all(t.event_times_s for t in traces):
        raise MeasurementError("nothing was measured: a stream ended without a token")
    running = [t for t in streams if t.event_times_s[0] < long.sent_s < t.event_times_s[-1]]
    if not running:
        raise MeasurementError(
            "nothing was measured: no stream was running when the long prompt arrived; "
            "ask for more tokens a stream (--stream-tokens)"
        )
    # Not those that began and ended among the streams' own prompts.
    gaps_ms = sorted(
        1000 * max(b - a for a, b in itertools.pairwise(t.event_times_s) if b > long.sent_s)
        for t in running
    )
    return {
        "num_running": len(running),
        "longest_tbt_ms": gaps_ms[-1],
        "median_longest_tbt_ms": gaps_ms[len(gaps_ms) // 2],
        "ttft_of_long_prompt_ms": 1000 * (long.event_times_s[0] - long.job.arrival_s),
    }


def command(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, help="Streams that run meanwhile.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="The long prompt.")] = 3000,
    stream_tokens: Annotated[int, typer.Option(min=2, help="Output of a stream.")] = STREAM_TOKENS,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """The longest gap that running streams suffer when a long prompt arrives."""
    model = model or first_model(url, api_key)
    with console.status(f"{streams} streams, then a prompt of {prompt_tokens} tokens"):
        found = measure_stall(
            LoadClient(url, model, api_key=api_key), streams, prompt_tokens, stream_tokens
        )
    publish(make_report(context, found, {"model": model}), as_json, out)
    if not as_json:
        output.print(
            f"longest TBT of {found['num_running']} running streams "
            f"{found['longest_tbt_ms']:.0f} ms; the {prompt_tokens}-token prompt's first token "
            f"after {found['ttft_of_long_prompt_ms']:.0f} ms"
        )
