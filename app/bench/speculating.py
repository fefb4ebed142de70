"""Servers with speculation beside the same ones without: tokens per second, equality of the text.

One stream, greedy, and a trained model: texts to copy, and questions whose answers repeat little. A
prompt is sent once to a server, since some remember what they have answered.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from app.bench.load.client import LoadClient, error_message, sse_events
from app.bench.report import MeasurementError
from app.bench.terminal import table
from app.paths import locate

_QUESTIONS = (
    "Tell me a story about a hedgehog.",
    "Write a story about a robot in a lighthouse.",
    "Make up a story about an octopus and an otter.",
    "Tell me a story about a baker and a dragon.",
    "Write a story about a ship.",
    "Tell me a story about a queen and a spoon.",
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


def ask(client: LoadClient, model: str, probe: SpeculationProbe) -> dict[str, list[Answer]]:
    """Every prompt once, one after the other. Raises MeasurementError if one is not answered."""
    return asyncio.run(answers(client, model, probe.prompts(), probe.output_tokens))


async def answers(
    client: LoadClient, model: str, prompts: Mapping[str, Sequence[list[int]]], num_tokens: int
) -> dict[str, list[Answer]]:
    return {
        task: [await _answer(client, model, prompt, num_tokens) for prompt in each]
        for task, each in prompts.items()
    }


async def _answer(client: LoadClient, model: str, prompt: list[int], num_tokens: int) -> Answer:
    body = {
        "model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    root, text, tokens = client.root, "", 0
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


def rates(answers: Mapping[str, Sequence[Answer]]) -> dict[str, float]:
    """Of each task the median over its prompts."""
    return {
        f"{task}, tokens/s": statistics.median(answer.rate for answer in each)
        for task, each in answers.items()
    }


def pairs(
    plain_of: Mapping[str, str], rounds: Mapping[str, Sequence[Mapping[str, Sequence[Answer]]]]
) -> list[dict[str, Any]]:
    """A row for each speculating server and task, of the rounds that both servers had.

    plain_of: of speculating servers those without. speed_up: the median over rounds and prompts of
    the rate over the rate of the same prompt without. same_text: of all those, how many texts are
    the same; plain_repeats: how many of the server without are the same as in its first round.
    """
    rows = []
    for name, plain in plain_of.items():
        rounds_of_both = list(zip(rounds.get(name, ()), rounds.get(plain, ()), strict=False))
        for task in rounds_of_both[0][0] if rounds_of_both else ():
            both, repeated = list[tuple[Answer, Answer]](), 0
            for with_drafts, without in rounds_of_both:
                both += zip(with_drafts[task], without[task], strict=True)
                first = rounds_of_both[0][1][task]
                repeated += sum(a.text == b.text for a, b in zip(without[task], first, strict=True))
            rows.append(
                {
                    "server": name,
                    "task": task,
                    "plain_tokens_per_s": statistics.median(b.rate for _, b in both),
                    "tokens_per_s": statistics.median(a.rate for a, _ in both),
                    "speed_up": statistics.median(a.rate / b.rate for a, b in both),
                    "texts": len(both),
                    "same_text": sum(a.text == b.text for a, b in both),
                    "plain_repeats": repeated,
                }
            )
    return rows


def pairs_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("server", "task", "tokens/s", "with drafts", "speed-up", "the same text")
    cells = [
        (
            r["server"], r["task"], f"{r['plain_tokens_per_s']:.0f}", f"{r['tokens_per_s']:.0f}",
            f"{r['speed_up']:.2f}", f"{r['same_text']} of {r['texts']}",
        )
        for r in rows
    ]  # fmt: skip
    return table("one stream, greedy", columns, cells, num_words=2)
