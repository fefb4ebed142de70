"""What plain transformers answers, and how the live engine is asked the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from actors.scheduling.request import SamplingParams
from app.engine_client.client import GenerationRequest
from app.engine_client.live import LiveEngine
from tests import tiny_models
from tests.once_a_run import once_a_run

MAX_TOKENS = 16
# Forty prompts, from one token to most of the context, in no order.
LENGTHS = (*[(i * 37) % 160 + 1 for i in range(36)], 1, 2, 3, 200)


def make_prompts(lengths: Sequence[int] = LENGTHS, seed: int = 3) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, 256, (n,), generator=generator).tolist()) for n in lengths]


@once_a_run
def expected(
    variant: str,
    lengths: tuple[int, ...] = LENGTHS,
    max_tokens: int = MAX_TOKENS,
    **overrides: Any,
) -> list[list[int]]:
    """Greedy tokens of transformers in float32, end-of-sequence ignored; all prompts at once, the
    shorter ones padded on the left."""
    prompts, width = make_prompts(lengths), max(lengths)
    rows = tiny_models.build(variant, **overrides).generate(
        torch.tensor([(0,) * (width - len(p)) + p for p in prompts]),
        attention_mask=torch.tensor([[0] * (width - n) + [1] * n for n in lengths]),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answers: list[list[int]] = rows[:, width:].tolist()
    return answers


async def ask(
    engine: LiveEngine, prompt: Sequence[int], max_tokens: int = MAX_TOKENS, **sampling: Any
) -> list[int]:
    """One greedy request; checks that tokens are numbered without gap or repetition."""
    tokens: list[int] = []
    finished = None
    request = GenerationRequest(
        "test", tuple(prompt), SamplingParams(max_tokens=max_tokens, **sampling)
    )
    async for chunk in engine.generate(request):
        assert chunk.first == len(tokens)
        tokens += chunk.tokens
        finished = chunk.finish_reason
    assert finished is not None
    return tokens


async def ask_all(
    engine: LiveEngine, prompts: Sequence[Sequence[int]], max_tokens: int = MAX_TOKENS
) -> list[list[int]]:
    return list(await asyncio.gather(*[ask(engine, p, max_tokens) for p in prompts]))


async def settled(engine: LiveEngine) -> dict[str, Any]:
    """The engine's statistics once nothing is outstanding (aborts take an iteration)."""
    for _ in range(200):
        status = dict(await engine.status())
        idle = ("num_waiting", "num_decoding", "num_prefilling", "num_finishing", "num_in_flight")
        if not any(status[key] for key in idle):
            return status
        await asyncio.sleep(0.02)  # polling for an end, bounded: not a wait for time to pass
    raise AssertionError(f"the engine never came to rest: {status}")
