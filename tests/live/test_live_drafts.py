"""A draft model in live engines: the same tokens, also when a stage dies between them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.scheduling.request import SamplingParams
from app.engine_client.client import GenerationRequest
from app.engine_client.live import LiveEngine
from tests.live.reference import make_prompts, settled

pytestmark = pytest.mark.ray

LENGTH = 80


async def ask_all(engine: LiveEngine, has_begun: asyncio.Event) -> list[list[int]]:
    """Greedy and drawn answers; `has_begun` is set once one has some tokens."""

    async def ask(number: int, prompt: Sequence[int]) -> list[int]:
        sampling = SamplingParams(LENGTH, temperature=number % 2, seed=number)
        tokens: list[int] = []
        async for chunk in engine.generate(GenerationRequest("test", tuple(prompt), sampling)):
            assert chunk.first == len(tokens)
            tokens += chunk.tokens
            if len(tokens) > LENGTH // 4:
                has_begun.set()
        return tokens

    prompts = make_prompts((3, 40, 100, 17))
    return list(await asyncio.gather(*[ask(i, p) for i, p in enumerate(prompts)]))


async def kill_a_stage(engine: LiveEngine, has_begun: asyncio.Event) -> None:
    await has_begun.wait()
    *_, (pid, *_) = await engine.stage_pids()
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("stages", "ranks"), [(1, 1), (2, 2)])
async def test_the_same_tokens_also_after_a_death(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
    stages: int,
    ranks: int,
) -> None:
    folder = tiny_model("llama")
    answers = []
    for speculation in ({"drafter": "none"}, {"drafter": "model", "model": str(folder)}):
        sections: dict[str, Any] = {
            "parallel": {"pipeline_stages": stages, "tensor_ranks": ranks},
            "scheduling": {"token_budget": 64},
            "engine": {"calibrate": False},
            "speculation": speculation,
        }
        engine = make_engine(folder, **sections)
        await engine.start()
        has_begun = asyncio.Event()
        try:
            answering = asyncio.create_task(ask_all(engine, has_begun))
            if "model" in speculation:
                await kill_a_stage(engine, has_begun)
            answers.append(await answering)
            status = await settled(engine)
        finally:
            await engine.close()
        assert status["num_free_blocks"] == status["num_blocks"], "KV blocks leaked"
    assert answers[0] == answers[1]
    assert status["recoveries"] == 1
    assert status["num_accepted_drafts"] > LENGTH
