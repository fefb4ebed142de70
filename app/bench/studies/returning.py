"""`legato bench returning`: TTFT of a conversation whose KV was evicted from the device.

Conversations are begun one after another on a device that holds some of them only. Then each comes
back with a new turn: computed again without a second tier, fetched from host memory with one, and
from disk once the engine has been started anew. Beside running streams the same prompts show what
saving and fetching do to the streams.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from actors.scheduling.request import SamplingParams
from app.bench.report import MeasurementError, make_report, publish
from app.bench.studies.live_engine import local_engine, read_args
from app.bench.terminal import Json, Out, console, output, say_duration, table
from app.engine_client.client import EngineClient, GenerationRequest

DEFAULT_CONFIG = Path("configs/serve/bench_135m.yaml")
TURN = 32  # new tokens of a returning conversation
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 8, 64, 400
KEPT_WITHIN_S = 60.0

Prompt = tuple[int, ...]


class Conversations:
    """Draws prompts of random tokens, all distinct."""

    def __init__(self, vocab_size: int, num_tokens: int) -> None:
        self._draw = random.Random(5)
        self._vocabulary = range(min(300, vocab_size - 1), vocab_size)
        self.num_tokens = num_tokens

    def new(self, num_tokens: int | None = None) -> Prompt:
        return tuple(self._draw.choices(self._vocabulary, k=num_tokens or self.num_tokens))

    def next_turn(self, conversation: Prompt) -> Prompt:
        return (*conversation, *self.new(TURN))


async def times_s(engine: EngineClient, prompt: Prompt, num_tokens: int) -> list[float]:
    """Start of the request, then arrival of each token, on `time.perf_counter`."""
    begin_s = time.perf_counter()
    request = GenerationRequest("returning", prompt, SamplingParams(max_tokens=num_tokens))
    times = [time.perf_counter() async for chunk in engine.generate(request) if chunk.tokens]
    return [begin_s, *times]


async def ttfts_ms(engine: EngineClient, prompts: Sequence[Prompt]) -> list[float]:
    """TTFT of each prompt, sent one after another."""
    found = []
    for prompt in prompts:
        begin_s, first_s, *_ = await times_s(engine, prompt, 4)
        found.append(1000 * (first_s - begin_s))
    return found


async def gap_ms(engine: EngineClient, talk: Conversations, prompt: Prompt) -> float:
    """The longest gap of running streams from the moment the prompt is sent."""
    streams = [
        asyncio.create_task(times_s(engine, talk.new(STREAM_PROMPT), STREAM_TOKENS))
        for _ in range(STREAMS)
    ]
    await asyncio.sleep(1.0)
    sent_s, *_ = await times_s(engine, prompt, 4)
    gaps = []
    for _, *tokens in await asyncio.gather(*streams):
        gaps += [b - a for a, b in itertools.pairwise(tokens) if b > sent_s]
    return 1000 * max(gaps)


async def num_fetched(engine: EngineClient) -> int:
    return int((await engine.status()).get("num_fetched_blocks", 0))


async def until_written(folder: Path) -> None:
    """Wait until no more files appear. Raises MeasurementError if none do, or they do not stop."""
    before, give_up_s = -1, time.monotonic() + KEPT_WITHIN_S
    while time.monotonic() < give_up_s:
        await asyncio.sleep(1.0)
        count = await asyncio.to_thread(lambda: len(list(folder.rglob("*.kv"))))
        if count == before and count:
            return
        before = count
    raise MeasurementError("nothing was measured: the second tier's files do not come to an end")


async def measure(
    args: Mapping[str, Any], tokens: int, times: int, device_gib: float, folder: Path
) -> dict[str, Any]:
    """Run all measurements. Raises MeasurementError if a conversation that should be fetched was
    not."""
    kv = {**(args.get("kv") or {}), "memory_gib": device_gib}
    plain = {**args, "kv": kv}
    tier = {"host_cache_gib": 2, "disk_cache_gib": 4, "disk_cache_path": str(folder)}
    tiered = {**args, "kv": {**kv, **tier}}
    found: dict[str, Any] = {}
    with console.status("without a second tier"):
        async with local_engine(plain) as engine:
            talk = Conversations(engine.card.vocab_size, tokens)
            begun = [talk.new() for _ in range(times)]
            await ttfts_ms(engine, [talk.new()])
            found["new_ms"] = await ttfts_ms(engine, begun)
            found["recomputed_ms"] = await ttfts_ms(engine, [talk.next_turn(c) for c in begun])
            found["gap_new_ms"] = await gap_ms(engine, talk, talk.new())
    with console.status("with one"):
        async with local_engine(tiered) as engine:
            await ttfts_ms(engine, [talk.new()])
            found["new_saved_ms"] = await ttfts_ms(engine, begun)
            before = await num_fetched(engine)
            found["from_host_ms"] = await ttfts_ms(engine, [talk.next_turn(c) for c in begun])
            _check(await num_fetched(engine) - before, found["from_host_ms"], tokens)
            found["gap_saved_ms"] = await gap_ms(engine, talk, talk.new())
            found["gap_from_host_ms"] = await gap_ms(engine, talk, talk.next_turn(begun[0]))
            await until_written(folder)
    with console.status("started anew"):
        async with local_engine(tiered) as engine:
            await ttfts_ms(engine, [talk.new()])
            before = await num_fetched(engine)
            found["from_disk_ms"] = await ttfts_ms(engine, [talk.next_turn(c) for c in begun[1:]])
            _check(await num_fetched(engine) - before, found["from_disk_ms"], tokens)
            found["gap_from_disk_ms"] = await gap_ms(engine, talk, talk.next_turn(begun[0]))
    slow = median(found["recomputed_ms"])
    for name in ("host", "disk"):
        found[f"{name}_speed_up"] = slow / median(found[f"from_{name}_ms"])
    return found


def _check(fetched: int, ttfts: Sequence[float], tokens: int) -> None:
    if fetched * 32 < len(ttfts) * tokens:  # half of them, in blocks of 16
        raise MeasurementError(
            f"nothing was measured: only {fetched} blocks were fetched (is --device-gib so large "
            "that the device forgets nothing?)"
        )


def command(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="Whose application is started.")] = DEFAULT_CONFIG,
    prompt_tokens: Annotated[int, typer.Option(min=256, help="Of a conversation.")] = 3000,
    conversations: Annotated[int, typer.Option(min=3, help="That take turns.")] = 6,
    device_gib: Annotated[float, typer.Option(min=0.01, help="KV memory of the device.")] = 0.2,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """The first token of a returning conversation: computed, from host memory, from disk."""
    say_duration(60 + 30 * conversations, 180 + 60 * conversations, "three engines, one by one")
    args = read_args(config)
    with tempfile.TemporaryDirectory(prefix="legato-returning-") as folder:
        found = asyncio.run(measure(args, prompt_tokens, conversations, device_gib, Path(folder)))
    publish(make_report(context, found), as_json, out)
    if not as_json:
        output.print(_table(found))


def _table(found: Mapping[str, Any]) -> Any:
    rows = [
        ("computed again", "recomputed_ms", "gap_new_ms", None),
        ("new, and saved", "new_saved_ms", "gap_saved_ms", None),
        ("from host memory", "from_host_ms", "gap_from_host_ms", "host_speed_up"),
        ("from disk, after a restart", "from_disk_ms", "gap_from_disk_ms", "disk_speed_up"),
    ]
    return table(
        "A conversation's first token, ms",
        ("", "median", "slowest", "times sooner", f"longest gap of {STREAMS} streams"),
        [
            (
                name,
                f"{median(found[times]):.0f}",
                f"{max(found[times]):.0f}",
                "" if speed_up is None else f"{found[speed_up]:.1f}",
                f"{found[gap]:.0f}",
            )
            for name, times, gap, speed_up in rows
        ],
    )
