"""Sixty-four streams with random cancels: nothing leaks, doubles or goes missing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from actors.scheduling.request import FinishReason, SamplingParams
from app.engine_client.client import GenerationRequest
from app.engine_client.live import LiveEngine
from tests.live.reference import LENGTHS, ask, expected, make_prompts, settled

pytestmark = pytest.mark.ray
MAX_TOKENS = 24


async def read(engine: LiveEngine, prompt: tuple[int, ...], leave_after: int | None) -> list[int]:
    """Read one stream; leave without a word after so many tokens."""
    request = GenerationRequest("c", prompt, SamplingParams(max_tokens=MAX_TOKENS))
    tokens: list[int] = []
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            assert chunk.first == len(tokens)
            tokens += chunk.tokens
            if leave_after is not None and len(tokens) >= leave_after:
                break
    return tokens


async def test_row_14_random_cancels(
    make_engine: Callable[..., LiveEngine], tiny_model: Callable[..., Path]
) -> None:
    engine = make_engine(
        tiny_model("llama"),
        scheduling={"token_budget": 64, "max_requests": 24},
        kv={"memory_gib": 0.0012},
    )
    await engine.start()
    chance = random.Random(11)
    prompts, answers = make_prompts(), expected("llama", LENGTHS, MAX_TOKENS)
    try:
        for _ in range(3):
            chosen = [chance.randrange(len(prompts)) for _ in range(64)]
            leave = [chance.choice([None, 0, 1, 2, 5, 11, 23]) for _ in chosen]
            results = await asyncio.gather(
                *[read(engine, prompts[i], n) for i, n in zip(chosen, leave, strict=True)]
            )
            for i, n, tokens in zip(chosen, leave, results, strict=True):
                if n is None:
                    assert tokens == answers[i]
                else:
                    assert tokens == answers[i][: len(tokens)]
            status = await settled(engine)
            assert status["num_free_blocks"] == status["num_blocks"]
            assert engine.num_open == 0
    finally:
        await engine.close()


async def test_row_8_cancel_by_task_while_an_iteration_is_in_flight(
    make_engine: Callable[..., LiveEngine], tiny_model: Callable[..., Path]
) -> None:
    """A hundred callers cancelled mid-await: the graph stays usable."""
    engine = make_engine(tiny_model("llama"), parallel={"pipeline_stages": 2})
    await engine.start()
    prompts, answers = make_prompts(), expected("llama")
    try:
        for number in range(100):
            task = asyncio.create_task(ask(engine, prompts[number % len(prompts)], 200))
            for _ in range(number % 7):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        status = await settled(engine)
        assert status["num_free_blocks"] == status["num_blocks"]
        assert await ask(engine, prompts[0]) == answers[0]
    finally:
        await engine.close()


async def test_n_continuations_and_finish_reasons(
    make_engine: Callable[..., LiveEngine], tiny_model: Callable[..., Path]
) -> None:
    """n > 1 shares a prompt; seeds differ, each draw is that of its seed alone."""
    engine = make_engine(tiny_model("llama"))
    await engine.start()
    prompt = make_prompts()[5]
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=40)
    try:
        together: dict[int, list[int]] = {0: [], 1: [], 2: []}
        reasons = set()
        async for chunk in engine.generate(GenerationRequest("n", prompt, sampling, n=3)):
            together[chunk.index] += chunk.tokens
            reasons.add(chunk.finish_reason)
        alone = [await ask(engine, prompt, 12, temperature=1.0, seed=40 + i) for i in range(3)]
        assert [together[i] for i in range(3)] == alone
        assert len({tuple(t) for t in alone}) == 3
        assert FinishReason.LENGTH in reasons
    finally:
        await engine.close()
