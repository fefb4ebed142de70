"""Tensors of Gemma 4 in the tiny folders, all of which have other sizes than those of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from actors.stage.models.read import load_config
from actors.stage.weights.addition_shapes import addition_shapes, layer_addition_shapes


@pytest.mark.parametrize("variant", ["gemma4", "gemma4-inputs", "llama"])
def test_shapes_are_those_of_the_folder(tiny_model: Callable[..., Path], variant: str) -> None:
    folder = tiny_model(variant)
    config = load_config(folder)
    stored = {n: tuple(t.shape) for n, t in load_file(folder / "model.safetensors").items()}
    of_all = addition_shapes(config)
    assert of_all.items() <= stored.items()
    assert len(of_all) == (3 if variant == "gemma4-inputs" else 0)
    number = {"gemma4": 6, "gemma4-inputs": 4, "llama": 0}[variant]
    for layer in range(config.num_layers):
        shapes = layer_addition_shapes(config.at(layer), config.has_experts(layer))
        assert len(shapes) == number
        assert {f"model.layers.{layer}.{n}": s for n, s in shapes.items()}.items() <= stored.items()
