"""GGUF files of mixtures of experts give the tokens of the folders they were converted from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.stage.gguf_folder import model_folder
from tests import tiny_models
from tests.actors.stage.greedy_reference import BY_LENGTH, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.weights import gguf_mixtures
from tests.actors.stage.weights.gguf_conversions import as_they_are, convert
from tests.actors.stage.weights.gguf_hybrids import permuted_mamba2
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, answers

# What the format cannot say, as llama.cpp takes it to be.
LLAMA4 = {
    "attention_chunk_size": 8192, "attn_scale": 0.1, "floor_scale": 8192,
    "no_rope_layer_interval": 4, "num_hidden_layers": 5,
    "rope_parameters": tiny_models.VARIANTS["llama-llama3"][1]["rope_parameters"],
}  # fmt: skip
WHOLE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
ROTATED = {"position_embedding_type": "rope"}  # as published without Mamba
CASES: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "gpt-oss": ("gpt-oss", gguf_mixtures.gpt_oss, {}),
    "glm4moe": ("glm4-moe", as_they_are, {}),
    "glm4moe, whole heads rotated": ("glm4-moe", as_they_are, {"rope_parameters": WHOLE}),
    "minimax-m2": ("minimax-m2", as_they_are, {}),
    "qwen2moe": ("qwen2-moe", as_they_are, {"mlp_only_layers": []}),
    "qwen3vlmoe": ("qwen3-moe", as_they_are, {"mlp_only_layers": []}),
    "olmoe": ("olmoe", as_they_are, {}),
    "dots1": ("dots1", as_they_are, {"sliding_window": None, "n_group": 1, "topk_group": 1}),
    "ernie4_5-moe": ("ernie4-5-moe", as_they_are, {"moe_norm_min": 1e-12}),
    "hunyuan-moe": ("hunyuan-moe", as_they_are, {}),
    "exaone-moe": ("exaone-moe", as_they_are, {}),
    "llama4": ("llama4", gguf_mixtures.llama4, LLAMA4),
    "granitemoe": ("granite-moe-shared", permuted_mamba2, {}),
    "granitemoe, of Granite 4": ("granite-moe-hybrid", permuted_mamba2, ROTATED),
}


@pytest.mark.parametrize("architecture", CASES)
def test_families(tmp_path: Path, architecture: str) -> None:
    variant, change, overrides = CASES[architecture]
    path, called = tmp_path / "tiny.gguf", architecture.split(",")[0]
    model = convert(path, called, variant, gguf_mixtures.mixture_keys, change, **overrides)
    folder = model_folder(path, tmp_path / "cache")
    planner = MiniPlanner(make_chain(folder, 2), feeds=True)
    right = answers(model, variant in BY_LENGTH)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == right
