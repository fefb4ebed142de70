"""What transformers answers to the prompts of the greedy tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.scheduling.request import SamplingParams
from kernels.registry import BackendError, resolve_backend
from tests import tiny_models
from tests.once_a_run import once_a_run

MAX_TOKENS = 16
LENGTHS = (1, 2, 5, 16, 17, 40, 63)
# Their angles depend on the longest sequence, their chunks begin at the first column, or their
# biases make states of padding: their prompts are computed one at a time.
BY_LENGTH = (
    "bamba-biased", "granite-4-dense", "lfm2-adjusted", "llama-dynamic", "llama-longrope",
    "llama4", "llama4-images", "llama4-yarn", "nemotron-h-biased", "phi3-longrope",
)  # fmt: skip


def make_prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 7) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


@once_a_run
def expected(variant: str, lengths: tuple[int, ...] = LENGTHS, **overrides: Any) -> list[list[int]]:
    """What transformers generates. overrides: as of `tiny_models.build`."""
    return greedy_of(variant, tiny_models.build(variant, **overrides), make_prompts(lengths))


def greedy_of(variant: str, model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """As `greedy`, with what padding would change computed alone."""
    if variant in BY_LENGTH:
        return [answer for prompt in prompts for answer in greedy(model, [prompt])]
    return greedy(model, prompts)


def greedy(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Up to the end token, which is included."""
    answers = []
    for answer in generate(model, prompts, MAX_TOKENS):
        ends = [n for n, token in enumerate(answer, 1) if token == tiny_models.EOS_TOKEN_ID]
        answers.append(answer[: ends[0]] if ends else answer)
    return answers


def generate(
    model: Any, prompts: list[list[int]], num_tokens: int, **options: Any
) -> list[list[int]]:
    """All at once, the shorter ones padded on the left."""
    width = max(map(len, prompts))
    rows = model.generate(
        torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    answers: list[list[int]] = rows[:, width:].tolist()
    return answers


def skip_unless_available(backend: str) -> None:
    try:
        resolve_backend(backend, "cpu", torch.float32)
    except BackendError as why:
        pytest.skip(str(why))


GREEDY = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=(tiny_models.EOS_TOKEN_ID,))
