"""The requests of a chaotic load, their answers, and what is wrong with an answer.

A pool of requests is drawn from a seed and answered once while nothing fails; what they answer
later, under faults, must equal that to the byte.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.bench.load.client import error_message, sse_events

if TYPE_CHECKING:
    import aiohttp

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_TOKENS = range(300, 4000)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 12},
        "kind": {"enum": ["tone", "chord", "rest"]},
    },
    "required": ["name", "sizes", "kind"],
}
_NUMBERS = itertools.count()
SILENT_S = 90.0  # a stream without an event for so long hangs


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """leaves_after: events, then the client goes away. pace_s: what it waits before each read."""

    number: int
    kind: str
    path: str
    body: Mapping[str, Any]
    leaves_after: int | None = None
    pace_s: float = 0.0

    def fresh_body(self) -> Mapping[str, Any]:
        """The body, its schema described anew: a grammar that is not compiled yet, of the same
        language."""
        shape = self.body.get("response_format")
        if shape is None:
            return self.body
        schema = {**shape["json_schema"]["schema"], "description": f"number {next(_NUMBERS)}"}
        return {
            **self.body,
            "response_format": {
                **shape,
                "json_schema": {**shape["json_schema"], "schema": schema},
            },
        }


@dataclass(slots=True)
class ChaosAnswer:
    """The result of one request; times on `time.perf_counter`."""

    request: ChaosRequest
    sent_s: float
    texts: dict[int, str] = field(default_factory=dict)  # of each continuation
    finished: dict[int, str] = field(default_factory=dict)  # their finish reasons
    event_times_s: list[float] = field(default_factory=list)
    num_tokens: int | None = None  # as the server counts them at the end
    status: int = 0
    error: str | None = None
    left: bool = False
    retry_after_s: float | None = None

    @property
    def is_refused(self) -> bool:
        """Whether it was refused with a retry time, before its first token."""
        return self.status in (429, 503) and not self.event_times_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """num_lost: tokens that did not come. num_doubled: tokens too many. is_changed: text that is
    not that of the unfailed run."""

    num_lost: int = 0
    num_doubled: int = 0
    is_changed: bool = False
    why: str | None = None

    @property
    def is_exact(self) -> bool:
        return self == Verdict()


def draw_pool(seed: int, model: str, count: int) -> list[ChaosRequest]:
    """The pool, determined by the seed: a canary, then the kinds in turn."""
    chance = random.Random(seed)
    kinds: list[Callable[[random.Random], dict[str, Any]]] = [
        _greedy, _seeded, _json, _long, _chat, _leaving, _slow, _several,
    ]  # fmt: skip
    pool = []
    for number in range(count):
        make = kinds[number % len(kinds)] if number else _canary
        drawn = make(chance)
        body = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **drawn.pop("body"),
        }
        pool.append(ChaosRequest(number, make.__name__.lstrip("_"), body=body, **drawn))
    return pool


def _prompt(chance: random.Random, least: int, most: int) -> list[int]:
    return chance.choices(_TOKENS, k=chance.randint(least, most))


def _canary(chance: random.Random) -> dict[str, Any]:
    body = {"prompt": _prompt(chance, 8, 8), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return {"path": _COMPLETIONS, "body": body}


def _greedy(chance: random.Random) -> dict[str, Any]:
    body = {
        "prompt": _prompt(chance, 4, 200),
        "max_tokens": chance.randint(200, 900),
        "temperature": 0,
        "ignore_eos": True,
    }
    return {"path": _COMPLETIONS, "body": body}


def _seeded(chance: random.Random) -> dict[str, Any]:
    drawn = _greedy(chance)
    drawn["body"] |= {"temperature": 0.9, "top_p": 0.95, "seed": chance.randrange(2**40)}
    return drawn


def _several(chance: random.Random) -> dict[str, Any]:
    drawn = _seeded(chance)
    drawn["body"] |= {"n": chance.randint(2, 3), "max_tokens": 200}
    return drawn


def _json(chance: random.Random) -> dict[str, Any]:
    schema = {**_SCHEMA, "title": f"thing {chance.randrange(3)}"}
    shape = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    body = {
        "prompt": _prompt(chance, 4, 40),
        "max_tokens": 300,
        "temperature": chance.choice([0, 0.8]),
        "seed": chance.randrange(2**40),
        "response_format": shape,
    }
    return {"path": _COMPLETIONS, "body": body}


def _long(chance: random.Random) -> dict[str, Any]:
    body = {
        "prompt": _prompt(chance, 1500, 3500),
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
    }
    return {"path": _COMPLETIONS, "body": body}


def _chat(chance: random.Random) -> dict[str, Any]:
    said = chance.choice(["What is a stall?", "Write a Python function.", "Count to twenty."])
    body = {
        "messages": [{"role": "user", "content": f"{said} ({chance.randrange(1000)})"}],
        "max_tokens": 300,
        "temperature": 0.7,
        "seed": chance.randrange(2**40),
    }
    return {"path": _CHAT, "body": body}


def _leaving(chance: random.Random) -> dict[str, Any]:
    return {**_greedy(chance), "leaves_after": chance.randint(1, 150)}


def _slow(chance: random.Random) -> dict[str, Any]:
    return {**_greedy(chance), "pace_s": 0.02}


async def ask(
    session: aiohttp.ClientSession, root: str, request: ChaosRequest, *, is_quiet: bool = False
) -> ChaosAnswer:
    """Send one request; a failure is part of the answer. is_quiet: neither leave early nor read
    slowly."""
    import aiohttp

    answer = ChaosAnswer(request, time.perf_counter())
    try:
        async with session.post(root + request.path, json=request.fresh_body()) as response:
            answer.status = response.status
            if response.status != 200:
                answer.error = error_message(await response.text())
                answer.retry_after_s = float(response.headers.get("retry-after", 1))
            else:
                await _read(response, answer, is_quiet)
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _read(response: aiohttp.ClientResponse, answer: ChaosAnswer, is_quiet: bool) -> None:
    request, ended = answer.request, False
    async for now_s, events in sse_events(response):
        for event in events:
            if event.startswith(b":"):  # a comment, which only keeps the stream alive
                continue
            data = event.removeprefix(b"data: ")
            ended = ended or data == b"[DONE]"
            if not ended:
                _note_event(answer, json.loads(data), now_s)
        if is_quiet:
            continue
        if request.leaves_after is not None and len(answer.event_times_s) >= request.leaves_after:
            answer.left = True
            response.close()
            return
        if request.pace_s:
            await asyncio.sleep(request.pace_s)
    if not ended and answer.error is None:
        answer.error = "the stream ended without its last event"


def _note_event(answer: ChaosAnswer, event: dict[str, Any], now_s: float) -> None:
    if "error" in event:
        answer.error = str(event["error"].get("message"))
        return
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        index = choice["index"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        answer.texts[index] = answer.texts.get(index, "") + text
        if choice["finish_reason"] is not None:
            answer.finished[index] = choice["finish_reason"]
        answer.event_times_s.append(now_s)


def judge(answer: ChaosAnswer, wanted: ChaosAnswer) -> Verdict:
    """Compare with the answer to the same request without faults."""
    for index, text in answer.texts.items():
        if not wanted.texts.get(index, "").startswith(text):
            pairs = zip(text, wanted.texts.get(index, ""), strict=False)
            at = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            return Verdict(is_changed=True, why=f"other text from character {at} on")
    if answer.left:
        return Verdict()
    if answer.error is not None:
        missing = len(wanted.event_times_s) - len(answer.event_times_s)
        return Verdict(num_lost=max(1, missing), why=answer.error)
    same = (answer.texts, answer.finished, answer.num_tokens)
    if same != (wanted.texts, wanted.finished, wanted.num_tokens):
        missing = (wanted.num_tokens or 0) - (answer.num_tokens or 0)
        if missing < 0:
            return Verdict(num_doubled=-missing, why="more tokens than without faults")
        return Verdict(num_lost=max(1, missing), why="the answer is not whole")
    return Verdict()


async def unfailed(
    session: aiohttp.ClientSession, root: str, pool: Sequence[ChaosRequest], at_a_time: int = 4
) -> list[ChaosAnswer]:
    """Answers to all requests of the pool without faults, in order."""
    gate = asyncio.Semaphore(at_a_time)

    async def one(request: ChaosRequest) -> ChaosAnswer:
        async with gate:
            return await ask(session, root, request, is_quiet=True)

    return list(await asyncio.gather(*map(one, pool)))
