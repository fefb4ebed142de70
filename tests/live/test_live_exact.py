"""Tokens equal plain transformers', whatever the pipeline, ranks, budget, transport and KV size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from app.engine_client.live import LiveEngine
from tests.live.reference import ask, ask_all, expected, make_prompts, settled

pytestmark = pytest.mark.ray


# Each number of stages and of ranks, each transport; the other combinations: `make test-long`.
SHORT = {(1, 1, "graph"), (2, 2, "graph"), (3, 1, "call")}
LAYOUTS = [
    pytest.param(*layout, marks=[] if layout in SHORT else [pytest.mark.long])
    for layout in product((1, 2, 3), (1, 2), ("graph", "call"))
]


@pytest.mark.parametrize(("stages", "ranks", "transport"), LAYOUTS)
async def test_forty_prompts_at_once(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
    stages: int,
    ranks: int,
    transport: str,
) -> None:
    engine = make_engine(
        tiny_model("llama"),
        parallel={"pipeline_stages": stages, "tensor_ranks": ranks, "transport": transport},
        # About 110 blocks of 4 tokens, where the prompts alone want 850, and outputs so long that
        # requests overlap however slowly they come: preemption for certain.
        kv={"memory_gib": 110 * 4 * 3 * 2 * 2 * 16 * 4 / ranks / 2**30},
        scheduling={"max_requests": 32, "allocation": "chunk"},
    )
    await engine.start()
    try:
        num_preemptions = 0
        # What a budget makes of a step is the core's and each stage's affair, however many there
        # are and whatever carries it.
        for budget in (8, 64, 512) if (stages, ranks, transport) == (1, 1, "graph") else (64,):
            await engine.reconfigure({"token_budget": budget})
            answers = await ask_all(engine, make_prompts(), max_tokens=48)
            assert answers == expected("llama", max_tokens=48)
            status = await settled(engine)
            assert status["num_free_blocks"] == status["num_blocks"], "KV blocks leaked"
            num_preemptions = int(status["num_preemptions"])
        assert num_preemptions > 0, "the KV cache was meant to be too small"
    finally:
        await engine.close()


# Stages without actors go through all of them (tests/actors/stage/models/test_greedy.py).
@pytest.mark.long
@pytest.mark.parametrize("variant", ["qwen2-sliding", "qwen3"])
async def test_architectures(
    make_engine: Callable[..., LiveEngine], tiny_model: Callable[..., Path], variant: str
) -> None:
    engine = make_engine(
        tiny_model(variant), parallel={"pipeline_stages": 2}, scheduling={"token_budget": 48}
    )
    await engine.start()
    try:
        assert await ask_all(engine, make_prompts()) == expected(variant)
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("variant", "stages"),
    [pytest.param("llama", 1, marks=pytest.mark.long), ("llama", 2), ("qwen3-5", 1)],
)
async def test_drafts_change_no_token(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
    variant: str,
    stages: int,
) -> None:
    """Two tokens are likelier than all others, so that what is drawn repeats itself."""
    bias = tuple((token, 12.0) for token in range(2))
    answers = []
    for drafter in ("none", "lookup"):
        engine = make_engine(
            tiny_model(variant),
            parallel={"pipeline_stages": stages},
            scheduling={"token_budget": 64},
            speculation={"drafter": drafter},
            engine={"calibrate": False},  # by measured costs, guesses may not pay beside so many
        )
        await engine.start()
        try:
            asked = [
                ask(engine, prompt, 40, temperature=0.2 * (i % 3), seed=i, logit_bias=bias)
                for i, prompt in enumerate(make_prompts()[:12])
            ]
            answers.append(await asyncio.gather(*asked))
            status = await settled(engine)
        finally:
            await engine.close()
        assert status["num_free_blocks"] == status["num_blocks"], "KV blocks leaked"
        assert (status["num_accepted_drafts"] > 0) is (drafter == "lookup")
    assert answers[0] == answers[1]
