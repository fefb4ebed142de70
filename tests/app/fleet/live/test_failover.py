"""Engines are killed for real; a front's streams go on, token for token."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors.scheduling.request import Grammar, SamplingParams
from app.engine_client.client import GenerationRequest, TokenChunk
from app.fleet.client import FleetClient
from tests.live.reference import make_prompts
from tests.tiny_models import SLOW

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
MAX_TOKENS = 120
OUTLASTS = 600  # tokens of a stream that no slow front sees end before its copy is done
LENGTHS = (3, 17, 40, 60, 5, 81, 22, 9)


def mixed(max_tokens: int = MAX_TOKENS) -> list[GenerationRequest]:
    """Streams of every kind: greedy, drawn, bound to a grammar, with log-probabilities, several
    of one prompt."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 7, "top_k": 20},
        {"temperature": 0.8, "seed": 11, "top_p": 0.9, "repetition_penalty": 1.2},
        {"logprobs": 3, "prompt_logprobs": 2},
        {"grammar": Grammar("regex", "(ab|cd){20,60}"), "temperature": 1.0, "seed": 3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 1.0, "seed": 5},
    ]
    requests = []
    for number, prompt in enumerate(make_prompts(LENGTHS * 4)):
        sampling = SamplingParams(max_tokens, **kinds[number % len(kinds)])
        n = 3 if number % 8 == 1 else 1
        requests.append(GenerationRequest(f"r{number}", prompt, sampling, n=n))
    return requests


# continuation -> tokens, then log-probabilities and what is pooled, then the reason
Answer = dict[int, list[Any]]


async def read(
    front: FleetClient, request: GenerationRequest, on_chunk: Callable[[TokenChunk], None]
) -> Answer:
    tokens: Answer = {index: [] for index in range(request.n)}
    rest: Answer = {index: [] for index in range(request.n)}
    async for chunk in front.generate(request):
        assert chunk.first == len(tokens[chunk.index]), "a token was lost or doubled"
        tokens[chunk.index] += chunk.tokens
        rest[chunk.index] += [*chunk.prompt_logprobs, *chunk.logprobs, *chunk.pooled]
        if chunk.finish_reason is not None:
            rest[chunk.index].append(chunk.finish_reason)
        on_chunk(chunk)
    return {index: [*tokens[index], *rest[index]] for index in tokens}


async def through(
    front: FleetClient, requests: list[GenerationRequest], strike: Callable[[], None] | None = None
) -> tuple[list[Answer], float]:
    """All answers, and the longest pause in seconds; `strike` falls once all have begun."""
    begun: set[str] = set()
    struck = strike is None
    pause_s = 0.0

    async def one(request: GenerationRequest) -> Answer:
        last_s: float | None = None

        def note(chunk: TokenChunk) -> None:
            nonlocal struck, last_s, pause_s
            now_s = time.monotonic()
            pause_s = max(pause_s, now_s - (last_s or now_s))
            last_s = now_s
            begun.add(request.request_id)
            if not struck and strike is not None and len(begun) == len(requests):
                struck = True
                strike()

        return await read(front, request, note)

    answers = await asyncio.gather(*[one(request) for request in requests])
    assert struck
    return list(answers), pause_s


async def at_rest(front: FleetClient) -> None:
    """Every engine has let go of everything."""
    assert front.num_open == 0
    for _ in range(500):
        status = await front.status()
        if not any(status[f"num_{s}"] for s in ("waiting", "decoding", "prefilling", "finishing")):
            assert status["num_free_blocks"] == status["num_blocks"]
            return
        await asyncio.sleep(0.02)  # polling, bounded
    raise AssertionError(f"the fleet never came to rest: {status}")


async def test_a_killed_engines_streams_go_on_elsewhere(
    make_fleet: Callable[..., Any],
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its closed sockets tell, at once: silence and the periodic look are out of the question."""
    monkeypatch.setattr("app.fleet.client._SILENT_AFTER_S", 1e9)
    monkeypatch.setattr("app.fleet.client._WATCH_PERIOD_S", 1e9)
    fleet = await make_fleet(2, tiny_model("llama", **SLOW))
    pid = await fleet.pid(0)
    unfailed, quiet_s = await through(fleet.front, mixed())
    places: dict[tuple[str, int], list[str]] = {}

    def placed(request_id: str, index: int, engine_id: str) -> None:
        places.setdefault((request_id, index), []).append(engine_id)

    told = [replace(r, placed=partial(placed, r.request_id)) for r in mixed()]
    answers, pause_s = await through(fleet.front, told, lambda: os.kill(pid, signal.SIGKILL))
    assert answers == unfailed
    assert len(places) == sum(request.n for request in told)
    moved = [there for there in places.values() if len(set(there)) == 2]
    assert moved
    assert {there[-1] for there in moved} == {next(iter(fleet.front.snapshots)).engine_id}
    logging.getLogger("legato.test").warning(
        "longest pause %.2f s, unfailed %.2f s", pause_s, quiet_s
    )
    shown = (await fleet.front.status())["fleet"]
    assert shown["num_moves"] > 0
    assert shown["num_inexact_moves"] == 0
    await at_rest(fleet.front)
