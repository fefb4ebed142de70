"""GGUF files of dense decoders give the tokens of the folders that they were converted from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.stage.gguf_folder import model_folder
from tests.actors.stage.greedy_reference import BY_LENGTH, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.weights.gguf_conversions import (
    as_they_are,
    convert,
    dense_keys,
    permuted_mamba2,
)
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, answers

# What the format cannot say, as llama.cpp takes it to be.
COHERE2 = {"layer_types": [*["sliding_attention"] * 3, "full_attention"], "num_hidden_layers": 4}
CASES: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "exaone4": ("exaone4", as_they_are, {}),
    "exaone4, without windows": ("exaone4-unlimited", as_they_are, {}),
    "seed_oss": ("seed-oss", as_they_are, {}),
    "glm4": ("glm4", as_they_are, {}),
    "command-r": ("cohere", as_they_are, {}),
    "cohere2": ("cohere2", as_they_are, COHERE2),
    "granite": ("granite-4-dense", permuted_mamba2, {"layer_types": ["attention"] * 3}),
}


@pytest.mark.parametrize("architecture", CASES)
def test_families(tmp_path: Path, architecture: str) -> None:
    variant, change, overrides = CASES[architecture]
    path, called = tmp_path / "tiny.gguf", architecture.split(",")[0]
    model = convert(path, called, variant, dense_keys, change, **overrides)
    folder = model_folder(path, tmp_path / "cache")
    planner = MiniPlanner(make_chain(folder, 2), feeds=True)
    right = answers(model, variant in BY_LENGTH)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == right
