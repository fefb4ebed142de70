"""Layers with a state, whose kernels are interpreted, against transformers' tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the GPU backends need it")

from actors.scheduling.request import SamplingParams
from tests.actors.stage.greedy_reference import expected, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, chain, make_runner
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
