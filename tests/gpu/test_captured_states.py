"""Layers with a state, whose kernels are interpreted, against transformers' tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the GPU backends need it")

from actors.scheduling.request import Request, SamplingParams
from tests.actors.stage.greedy_reference import expected, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, chain, make_runner
from tests.actors.stage.test_speculation import BASE, serve
from tests.gpu.captures import EagerCapture

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LENGTHS = (1, 3, 13)
TOKENS = 3
LAYERS = 3  # of which two have a state


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU a graph is no EagerCapture")
def test_captured_steps_give_the_same_tokens(tiny_model: Callable[..., Path]) -> None:
    runner = make_runner(
        tiny_model("qwen3-5", num_hidden_layers=LAYERS), backend="triton", max_requests=3,
        graph_tokens=16, max_model_len=32,
    )  # fmt: skip
    capture = EagerCapture()
    runner.capture(capture)
    planner = MiniPlanner(chain([runner]), chunk=8, budget=24)
    answers = planner.run(make_prompts(LENGTHS), SamplingParams(max_tokens=TOKENS))
    assert answers == [answer[:TOKENS] for answer in expected("qwen3-5", LENGTHS)]
    assert planner.num_hybrid_steps > 1
    assert capture.num_replays >= len([result for result in planner.results if result.tokens])


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU a graph is no EagerCapture")
def test_captured_drafts_give_the_same_tokens(tiny_model: Callable[..., Path]) -> None:
    """Slices with a wrong draft are computed again by a replay, too."""
    folder = tiny_model("qwen3-5", num_hidden_layers=LAYERS)
    spec = {"max_requests": 3, "graph_tokens": 16, "max_model_len": 32}
    plain = replace(
        BASE, max_requests=3, max_model_len=32, max_step_tokens=16, token_budget=16,
        num_saved_states=3, swap="never",
    )  # fmt: skip
    requests = [
        Request(i + 1, tuple(p), SamplingParams(9, temperature=i % 2, seed=i), 0.0)
        for i, p in enumerate(make_prompts((3, 7)))
    ]
    expected, _, _ = serve(plain, chain([make_runner(folder, **spec)]), requests=requests)
    runner, capture = make_runner(folder, backend="triton", **spec), EagerCapture()
    runner.capture(capture)
    config = replace(plain, drafter="lookup", max_drafts=3)
    found, core, plans = serve(config, chain([runner]), expected, requests)
    assert [found[i].tokens for i in (1, 2)] == [expected[i].tokens for i in (1, 2)]
    assert 0 < core.outcomes.num_accepted_drafts < core.speculation.num_drafts
    again = [s for p in plans for s in p.named_slices if s.start and s.num_tokens > 1 and
             s.request_id not in dict(p.drafts)]  # fmt: skip
    assert again
    assert capture.num_replays == sum(bool(plan.slices) for plan in plans)
