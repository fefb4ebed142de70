"""Mixers: limits of steps as transformers has them, and bits that do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from actors.scheduling.request import SamplingParams
from actors.stage.models import mixers
from tests import tiny_models
from tests.actors.stage.greedy_reference import make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain

ACTIVATIONS = [
    (mixers.sigmoid, torch.sigmoid),
    (mixers.silu, functional.silu),
    (mixers.softplus, functional.softplus),
]


@pytest.mark.parametrize(("ours", "theirs"), ACTIVATIONS)
def test_bits_of_an_element_are_those_of_it_alone(
    ours: Callable[[torch.Tensor], torch.Tensor], theirs: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.cat((torch.randn(1000) * 9, torch.tensor([0.0, 200.0, -200.0])))
    torch.testing.assert_close(ours(x), theirs(x))
    for size in range(1, 20):
        assert torch.equal(ours(x[:size].clone()), ours(x)[:size])


def test_limits_of_steps(tiny_model: Callable[..., Path]) -> None:
    """Log-probabilities of a prompt, where transformers applies them; in its steps of one token it
    does not."""
    limits: dict[str, Any] = {"time_step_limit": [0.4, 0.9]}
    planner = MiniPlanner(make_chain(tiny_model("granite-4-dense", **limits)), chunk=9)
    [prompt] = make_prompts((40,))
    planner.run([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))
    entries = [
        e for result in planner.results for _, _, some in result.prompt_logprobs for e in some
    ]
    found = torch.tensor([entry.logprob for entry in entries])
    scores: list[torch.Tensor] = []
    for changed in (limits, {}):
        with torch.no_grad():
            logits = tiny_models.build("granite-4-dense", **changed)(torch.tensor([prompt])).logits
        rows = logits[0, :-1].log_softmax(-1)
        scores.append(rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
    limited, free = scores
    torch.testing.assert_close(found, limited, atol=1e-4, rtol=0)
    assert (limited - free).abs().max() > 0.1
