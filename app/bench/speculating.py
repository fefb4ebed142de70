"""Servers with speculation beside the same ones without: tokens per second, equality of the text.

One stream, greedy, and a trained model: texts to copy, and questions whose answers repeat little. A
prompt is sent once to a server, since some remember what they have answered. Both servers run, and
one of them computes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from app.bench.load.client import LoadClient, error_message, sse_events
from app.bench.report import MeasurementError
from app.bench.terminal import table
from app.paths import locate

_TOLD_OF = ("a hedgehog", "a robot in a lighthouse", "an octopus", "a dragon", "a ship", "a queen")
_QUESTIONS = tuple(
    f"{begin} a story about {who}." for begin in ("Tell me", "Write", "Make up") for who in _TOLD_OF
)


class SpeculationProbe(BaseModel):
    """texts: the files whose first `text_tokens` tokens are to be repeated."""

    model_config = ConfigDict(extra="forbid")

    tokenizer: Path = Path("configs/models/demo")
    texts: list[Path]
    text_tokens: int = 128
    output_tokens: int = 96

    def prompts(self) -> dict[str, list[list[int]]]:
        """Token ids by task."""
        from tokenizers import Tokenizer

        encode = Tokenizer.from_file(str(locate(self.tokenizer) / "tokenizer.json")).encode
        begin, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
        copied = []
        for file in self.texts:
            text = encode(locate(file).read_text()).ids[: self.text_tokens]
            copied.append([*encode(f"{begin}Repeat this: ").ids, *text, *encode(end).ids])
        told = [encode(f"{begin}{question}{end}").ids for question in _QUESTIONS]
        return {"copying": copied, "a story": told}


@dataclass(frozen=True, slots=True)
class Answer:
    """rate: tokens per second, from the request to the last event, since tokens may be sent in one
    piece; text: as it was streamed."""

    rate: float
    text: str


class Pair(NamedTuple):
    """The answers to one prompt, with drafts and without."""

    drafted: Answer
    plain: Answer


@dataclass(frozen=True, slots=True)
class Asked:
    """A server, and the model it answers with."""

    client: LoadClient
    model: str


async def in_turn(
    drafting: Asked, plain: Asked, prompts: Mapping[str, Sequence[list[int]]], num_tokens: int
) -> dict[str, list[Pair]]:
    """Every prompt once to each of two servers, one after the other, since a machine drifts: the
    first and the second alternate. Raises MeasurementError if one is not answered."""
    pairs: dict[str, list[Pair]] = {task: [] for task in prompts}
    for task, each in prompts.items():
        for index, prompt in enumerate(each):
            order = (drafting, plain) if index % 2 else (plain, drafting)
            given = [await _answer(asked, prompt, num_tokens) for asked in order]
            pairs[task].append(Pair(*(given if index % 2 else reversed(given))))
    return pairs


async def _answer(asked: Asked, prompt: list[int], num_tokens: int) -> Answer:
    import aiohttp  # here, because `legato --help` imports this module

    try:
        return await _streamed(asked, prompt, num_tokens)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        why = str(error) or type(error).__name__
        raise MeasurementError(f"{asked.client.root}: {why}") from error


async def _streamed(asked: Asked, prompt: list[int], num_tokens: int) -> Answer:
    body = {
        "model": asked.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    client, root, text, tokens = asked.client, asked.client.root, "", 0
    begin_s = last_s = time.perf_counter()
    # A connection each: llama.cpp closes it after a stream, and says so too late.
    async with (
        client.session() as session,
        session.post(f"{root}/v1/completions", json=body) as response,
    ):
        if response.status != 200:
            raise MeasurementError(f"{response.status}: {error_message(await response.text())}")
        async for at_s, events in sse_events(response):
            for event in events:
                if not event.startswith(b"data: {"):
                    continue
                read = json.loads(event.removeprefix(b"data: "))
                if "error" in read:
                    raise MeasurementError(f"{root}: {read['error']}")
                tokens = (read.get("usage") or {}).get("completion_tokens", tokens)
                for choice in read["choices"]:
                    last_s = at_s
                    text += choice["text"]
    if tokens != num_tokens:
        raise MeasurementError(f"{root}: {tokens} tokens of {num_tokens}")
    return Answer(tokens / (last_s - begin_s), text)


def pair_rows(rounds: Mapping[str, Sequence[Mapping[str, Sequence[Pair]]]]) -> list[dict[str, Any]]:
    """A row for each drafting server and task. rounds: of each such server, pairs by task.

    speed_up: the median over rounds and prompts of the rate over the rate of the same prompt
    without. same_text: of all those, how many texts are the same; plain_repeats: how many of the
    server without are the same as in its first round.
    """
    rows = []
    for name, of_server in rounds.items():
        for task in of_server[0] if of_server else ():
            all_pairs = [pair for found in of_server for pair in found[task]]
            first = [pair.plain.text for pair in of_server[0][task]] * len(of_server)
            repeats = (pair.plain.text == text for pair, text in zip(all_pairs, first, strict=True))
            rows.append(
                {
                    "server": name,
                    "task": task,
                    "plain_tokens_per_s": statistics.median(p.plain.rate for p in all_pairs),
                    "tokens_per_s": statistics.median(p.drafted.rate for p in all_pairs),
                    "speed_up": statistics.median(p.drafted.rate / p.plain.rate for p in all_pairs),
                    "texts": len(all_pairs),
                    "same_text": sum(p.drafted.text == p.plain.text for p in all_pairs),
                    "plain_repeats": sum(repeats),
                }
            )
    return rows


def pair_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("server", "task", "tokens/s", "with drafts", "speed-up", "the same text")
    cells = [
        (
            r["server"], r["task"], f"{r['plain_tokens_per_s']:.0f}", f"{r['tokens_per_s']:.0f}",
            f"{r['speed_up']:.2f}", f"{r['same_text']} of {r['texts']}",
        )
        for r in rows
    ]  # fmt: skip
    return table("one stream, greedy", columns, cells, num_words=2)
