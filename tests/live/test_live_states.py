"""Models whose layers keep states: tokens equal those of transformers, from saved states too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.scheduling.request import SamplingParams
from app.engine_client.client import GenerationRequest
from app.engine_client.live import LiveEngine
from tests.live.reference import ask_all, expected, make_prompts, settled

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(("stages", "ranks"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.long)])
async def test_forty_prompts_with_preemption(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
    stages: int,
    ranks: int,
) -> None:
    engine = make_engine(
        tiny_model("qwen3-5"),
        parallel={"pipeline_stages": stages, "tensor_ranks": ranks},
        kv={"memory_gib": 110 * 4 * 2 * 2 * 16 * 4 / ranks / 2**30},
        scheduling={"max_requests": 32, "allocation": "chunk", "token_budget": 64},
    )
    await engine.start()
    try:
        answers = await ask_all(engine, make_prompts(), max_tokens=48)
        assert answers == expected("qwen3-5", max_tokens=48)
        status = await settled(engine)
        assert status["num_free_blocks"] == status["num_blocks"], "KV blocks leaked"
        assert status["num_preemptions"] > 0, "the KV cache was meant to be too small"
        # Two answers to a prompt of 200 tokens, then one: its last full block ends at 196.
        for n in (2, 1):
            prompt, sampling = make_prompts()[-1], SamplingParams(max_tokens=16)
            answers, num_found = [[] for _ in range(n)], 0
            async for chunk in engine.generate(GenerationRequest(str(n), prompt, sampling, n=n)):
                answers[chunk.index] += chunk.tokens
                num_found = max(num_found, chunk.num_cached_tokens)
            assert answers == [expected("qwen3-5", max_tokens=48)[-1][:16]] * n
            assert num_found == 196
    finally:
        await engine.close()
