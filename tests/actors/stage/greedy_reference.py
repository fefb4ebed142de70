"""What transformers answers to the prompts of the greedy tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.scheduling.request import SamplingParams
from kernels.registry import BackendError, resolve_backend
from tests import tiny_models
from tests.once_a_run import once_a_run

MAX_TOKENS = 24
LENGTHS = (1, 2, 5, 16, 17, 40, 63)


def make_prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 7) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


@once_a_run
def expected(variant: str, lengths: tuple[int, ...] = LENGTHS, **overrides: Any) -> list[list[int]]:
    """What transformers generates, one prompt at a time. overrides: as of `tiny_models.build`."""
    model = tiny_models.build(variant, **overrides)
    answers = []
    for prompt in make_prompts(lengths):
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
        )
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


def skip_unless_available(backend: str) -> None:
    try:
        resolve_backend(backend, "cpu", torch.float32)
    except BackendError as why:
        pytest.skip(str(why))


GREEDY = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=(tiny_models.EOS_TOKEN_ID,))
