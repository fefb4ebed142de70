"""`legato bench handover`: how long a stream pauses when its KV moves to another engine.

Live engines of one thread each, and a front without HTTP. First an engine computes prompts and
another continues their streams, beside streams that decode there already: the pause of a hand-over
is the time between a stream's first and second token. Then engines leave one after the other, and
one stream moves each time; its pause is the longest gap from then on until after its move. The
engines' event logs tell what a pause consists of, and how fast KV was saved and fetched. Afterwards
one engine computes these streams anew: it must give the same tokens (`tokens_equal`).
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from actors.fleet.snapshot import Role
from app.bench.report import MeasurementError, make_report, publish
from app.bench.studies.followed import Seen, follow, tokens_equal
from app.bench.studies.kv_log import (
    Continued,
    EngineLog,
    bytes_per_s,
    continued,
    read_engine,
    read_rows,
)
from app.bench.studies.live_fleet import LiveFleet, args_of, block_bytes, live_fleet, router_of
from app.bench.terminal import Json, Out, console, numbers, output, say_duration, table
from app.engine_client.client import EngineClient
from app.telemetry.definitions import quantile

_PROBE_TOKENS = 12  # of each stream that is handed over
_BESIDE_TOKENS = 64  # the prompt of each stream that decodes beside
_BETWEEN_MOVES = 60  # tokens
_TAIL_TOKENS = 20  # after the last move
_PARTS = ("handed_over", "moved")  # of a report


async def hand_overs(
    front: EngineClient, lengths: Sequence[int], count: int, num_beside: int
) -> tuple[list[Seen], list[Seen]]:
    """(streams that were handed over one after the other, streams that decoded beside)."""
    chance = random.Random()
    most = front.card.max_model_len - _BESIDE_TOKENS
    beside = [Seen.of_length(_BESIDE_TOKENS, front, chance) for _ in range(num_beside)]
    tasks = [
        asyncio.create_task(follow(front, f"beside {number}", seen, most))
        for number, seen in enumerate(beside)
    ]
    for number in (64, *lengths):  # sizes of step that nothing has touched yet
        await follow(front, f"warm-up {number}", Seen.of_length(number, front, chance), 4)
    begin_s = time.perf_counter()
    probes = []
    for number in range(count):
        for length in lengths:
            seen = Seen.of_length(length, front, chance)
            await follow(front, f"{number}-{length}", seen, _PROBE_TOKENS)
            probes.append(seen)
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
    for seen in beside:
        seen.times_s = [at_s for at_s in seen.times_s if at_s >= begin_s]
    return probes, beside


async def moves(
    fleet: LiveFleet, front: EngineClient, num_tokens: int, count: int
) -> tuple[list[dict[str, float]], Seen]:
    """One stream that is `num_tokens` long as the first of its engines leaves: known tokens then,
    and the pause in ms of each move; and the stream. Every engine but the last leaves while it has
    it."""
    chance = random.Random()
    await follow(front, "warm-up", Seen.of_length(num_tokens, front, chance), 4)
    seen = Seen.of_length(num_tokens - _BETWEEN_MOVES, front, chance)
    total = (count + 1) * _BETWEEN_MOVES + 1000  # so long that no engine keeps it to its end
    stream = asyncio.create_task(follow(front, "moved", seen, total))
    found = []
    for number in range(1, count + 1):
        await _reached(seen, number * _BETWEEN_MOVES, stream)
        engines = (await front.status())["engines"]
        (here,) = [engine["id"] for engine in engines if engine["num_streams_here"]]
        begin_s = time.perf_counter()
        known = len(seen.prompt) + len(seen.tokens)
        await fleet.engines[here.rpartition(".")[0]].leave()
        await _reached(seen, len(seen.tokens) + _TAIL_TOKENS, stream)
        found.append({"num_tokens": known, "pause_ms": 1e3 * max(seen.gaps_s(begin_s))})
    stream.cancel()
    with suppress(asyncio.CancelledError):
        await stream
    return found, seen


async def _reached(seen: Seen, num_tokens: int, stream: asyncio.Task[None]) -> None:
    """Wait for so many tokens; raises what ended the stream before."""
    reached = asyncio.ensure_future(seen.until(num_tokens))
    await asyncio.wait((reached, stream), return_when=asyncio.FIRST_COMPLETED)
    if not reached.done():
        reached.cancel()
        stream.result()
        raise MeasurementError("the stream ended before it was moved")


def figures(
    probes: Sequence[Seen], streams: Sequence[Continued], block_bytes: float
) -> list[dict[str, Any]]:
    """A row per length of prompt: pauses as the caller saw them, their parts by the logs."""
    rows = []
    for length in sorted({len(seen.prompt) for seen in probes}):
        pauses_s = sorted(s.gaps_s()[0] for s in probes if len(s.prompt) == length)
        later_s = sorted(g for s in probes if len(s.prompt) == length for g in s.gaps_s()[1:])
        moved = [stream for stream in streams if stream.num_tokens == length + 1]
        if not moved:
            raise MeasurementError(f"no stream with a prompt of {length} tokens was handed over")
        parts = [stream.parts_ms() for stream in moved]
        rows.append(
            {
                "prompt_tokens": length,
                "num_streams": len(pauses_s),
                "pause_p50_ms": 1e3 * quantile(pauses_s, 0.5),
                "pause_p99_ms": 1e3 * quantile(pauses_s, 0.99),
                "later_tbt_p50_ms": 1e3 * quantile(later_s, 0.5),
                "parts_p50_ms": {name: median(part[name] for part in parts) for name in parts[0]},
                "fetched_mb": median(s.num_fetched for s in moved) * block_bytes / 1e6,
                "early_mb": median(s.num_early for s in moved) * block_bytes / 1e6,
            }
        )
    return rows


def rates(logs: Mapping[str, EngineLog], block_bytes: float) -> dict[str, float]:
    found = [move for log in logs.values() for move in log.moves]
    return {
        "saved_mb_per_s": bytes_per_s(found, block_bytes, is_fetch=False) / 1e6,
        "fetched_mb_per_s": bytes_per_s(found, block_bytes, is_fetch=True) / 1e6,
    }


def command(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="Settings of each engine.")] = Path(
        "configs/serve/bench_135m.yaml"
    ),
    prompts: Annotated[str, typer.Option(help="Lengths, by commas.")] = "500,1000,2000",
    count: Annotated[int, typer.Option(min=0, help="Streams of each length handed over.")] = 12,
    beside: Annotated[int, typer.Option(min=0, help="Streams decoding at the second engine.")] = 4,
    num_moves: Annotated[
        int, typer.Option("--moves", min=0, max=5, help="Engines that a stream leaves in turn.")
    ] = 3,
    tbt_ms: Annotated[float, typer.Option(min=1.0, help="The objective.")] = 100.0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Pauses of streams whose KV moves between engines of this machine, and their parts.

    Exits with status 1 where such a stream has other tokens than on one engine alone.
    """
    lengths = numbers(prompts, "--prompts", int)
    args = args_of(config, tbt_ms, 2000.0)
    say_duration(120, 240, "live engines, one thread each")
    found: dict[str, Any] = {"objective_ms": tbt_ms}
    if count:
        found["handed_over"] = asyncio.run(_split(args, lengths, count, beside))
    if num_moves:
        found["moved"] = asyncio.run(_leaving(args, max(lengths), num_moves))
    publish(make_report(context, found), as_json, out)
    if not as_json:
        _show(found)
    if not all(found[name]["tokens_equal"] for name in _PARTS if name in found):
        raise typer.Exit(1)


async def _split(
    args: Mapping[str, Any], lengths: Sequence[int], count: int, num_beside: int
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="legato-handover-") as folder:
        roles = {"prefill": Role.PREFILL, "decode": Role.DECODE}
        async with (
            live_fleet(args, roles, Path(folder)) as fleet,
            fleet.front(router_of("split")) as front,
        ):
            console.print("  live: prompts and streams on engines of their own")
            probes, others = await hand_overs(front, lengths, count, num_beside)
            end_s = time.monotonic()
            async with fleet.front(router_of("colocated"), ("decode",)) as alone:
                are_equal = await tokens_equal(alone, probes)
        logs = _logs(Path(folder), roles, end_s)
    size = block_bytes(args)
    gaps_s = sorted(gap for seen in others for gap in seen.gaps_s())
    return {
        "rows": figures(probes, continued(logs)[-len(probes) :], size),
        **rates(logs, size),
        "tokens_equal": are_equal,
        "beside_tbt_p50_ms": 1e3 * quantile(gaps_s, 0.5) if gaps_s else None,
        "beside_tbt_p99_ms": 1e3 * quantile(gaps_s, 0.99) if gaps_s else None,
        "beside_longest_ms": 1e3 * gaps_s[-1] if gaps_s else None,
    }


async def _leaving(args: Mapping[str, Any], num_tokens: int, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="legato-handover-") as folder:
        roles = {f"engine-{number}": Role.BOTH for number in range(count + 1)}
        async with (
            live_fleet(args, roles, Path(folder)) as fleet,
            fleet.front(router_of("colocated")) as front,
        ):
            console.print("  live: engines leave, a stream moves")
            rows, moved = await moves(fleet, front, num_tokens, count)
            end_s = time.monotonic()
            are_equal = await tokens_equal(front, [moved])  # by the engine that is left
        logs = _logs(Path(folder), roles, end_s)
    size = block_bytes(args)
    for row, stream in zip(rows, continued(logs)[-len(rows) :], strict=True):
        row |= {"num_tokens": stream.num_tokens, "fetched_mb": stream.num_fetched * size / 1e6}
        row["early_mb"] = stream.num_early * size / 1e6
        row |= {f"{name}_ms": part for name, part in stream.parts_ms().items()}
    return {"rows": rows, **rates(logs, size), "tokens_equal": are_equal}


def _logs(folder: Path, names: Iterable[str], end_s: float) -> dict[str, EngineLog]:
    """Up to that time, by `time.monotonic`; what comes after was not measured."""
    rows = {name: read_rows(folder / name) for name in names}
    return {
        name: read_engine(row for row in found if row["now_s"] <= end_s)
        for name, found in rows.items()
    }


def _show(found: Mapping[str, Any]) -> None:
    parts = ("handed_over", "fetched", "planned", "computed")
    limit = f"objective {found['objective_ms']:g} ms"
    if handed := found.get("handed_over"):
        rows = [
            (
                f"{row['prompt_tokens']}",
                f"{row['pause_p50_ms']:.0f}",
                f"{row['pause_p99_ms']:.0f}",
                *(f"{row['parts_p50_ms'][part]:.0f}" for part in parts),
                f"{row['fetched_mb']:.1f}",
                f"{row['early_mb']:.1f}",
            )
            for row in handed["rows"]
        ]
        columns = ("prompt tokens", "pause P50, ms", "P99", *parts, "KV, MB", "early, MB")
        output.print(table(f"between the first and the second token; {limit}", columns, rows))
    if moved := found.get("moved"):
        moves_told = [
            (
                f"{row['num_tokens']}",
                f"{row['pause_ms']:.0f}",
                *(f"{row[f'{part}_ms']:.0f}" for part in parts),
                f"{row['fetched_mb']:.1f}",
                f"{row['early_mb']:.1f}",
            )
            for row in moved["rows"]
        ]
        headings = ("known tokens", "pause, ms", *parts, "KV, MB", "early, MB")
        output.print(table(f"a stream whose engine leaves; {limit}", headings, moves_told))
    for name in _PARTS:
        if name in found:
            saved, fetched = found[name]["saved_mb_per_s"], found[name]["fetched_mb_per_s"]
            tokens = "equal" if found[name]["tokens_equal"] else "differ"
            output.print(
                f"{name}: saved {saved:.0f} MB/s, fetched {fetched:.0f} MB/s, tokens {tokens}"
            )
