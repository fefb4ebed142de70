"""A draft model in live engines: the same tokens, also when a stage dies between them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.scheduling.request import SamplingParams
from app.engine_client.client import GenerationRequest
from app.engine_client.live import LiveEngine
from tests.actors.stage.test_speculation import KINDS
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
    *_, (pid, *_) = await engine.stage_pids()  # beforehand: streams go on meanwhile
    await has_begun.wait()
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("variant", "stages", "ranks"),
    [
        pytest.param("llama", 1, 1, marks=pytest.mark.long),
        ("llama", 2, 2),
        pytest.param("qwen3-5", 2, 1, marks=pytest.mark.long),
    ],
)
async def test_the_same_tokens_also_after_a_death(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
    variant: str,
    stages: int,
    ranks: int,
) -> None:
    folder = tiny_model(variant)
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


NUM_PROMPTS, AT_ONCE = 200, 24  # fewer than places, as drafts share the rows of the logits
# Six tokens likelier than all others, so that what is drawn repeats itself: for half the prompts.
BIAS = tuple((token, 12.0) for token in range(6))


async def ask_everything(
    engine: LiveEngine, has_begun: asyncio.Event
) -> dict[tuple[int, int], tuple[list[int], str | None]]:
    """Every prompt with every kind of sampling; `has_begun` is set after a third of them."""
    places = asyncio.Semaphore(AT_ONCE)
    prompts = make_prompts([1 + (i * 37) % 90 for i in range(NUM_PROMPTS)])
    answers: dict[tuple[int, int], tuple[list[int], str | None]] = {}

    async def ask(number: int, kind: int) -> None:
        sampling = replace(KINDS[kind], seed=1000 * kind + number)
        if number % 2:
            sampling = replace(sampling, logit_bias=(*sampling.logit_bias, *BIAS))
        tokens: list[int] = []
        reason = None
        async with places:
            request = GenerationRequest("test", tuple(prompts[number]), sampling)
            async for chunk in engine.generate(request):
                assert chunk.first == len(tokens)
                tokens += chunk.tokens
                reason = chunk.finish_reason
        answers[number, kind] = tokens, reason
        if len(answers) > NUM_PROMPTS * len(KINDS) // 3:
            has_begun.set()

    await asyncio.gather(*[ask(i, k) for k in range(len(KINDS)) for i in range(NUM_PROMPTS)])
    return answers


@pytest.mark.long
@pytest.mark.parametrize(("stages", "ranks"), [(1, 1), (2, 1), (1, 2)])
async def test_the_same_tokens_in_a_campaign(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
    stages: int,
    ranks: int,
) -> None:
    """1800 requests with drafts and without; with drafts and two stages, one is killed."""
    answers = []
    for drafter in ("none", "lookup"):
        engine = make_engine(
            tiny_model("llama"),
            parallel={"pipeline_stages": stages, "tensor_ranks": ranks},
            scheduling={"token_budget": 128},
            engine={"calibrate": False},
            speculation={"drafter": drafter},
        )
        await engine.start()
        has_begun, kills = asyncio.Event(), stages > 1 and drafter == "lookup"
        try:
            answering = asyncio.create_task(ask_everything(engine, has_begun))
            if kills:
                await kill_a_stage(engine, has_begun)
            answers.append(await answering)
            status = await settled(engine)
        finally:
            await engine.close()
        assert status["num_free_blocks"] == status["num_blocks"], "KV blocks leaked"
        assert status["recoveries"] == kills
    assert len(answers[0]) == NUM_PROMPTS * len(KINDS)
    assert answers[0] == answers[1]
    assert status["num_accepted_drafts"] > NUM_PROMPTS
