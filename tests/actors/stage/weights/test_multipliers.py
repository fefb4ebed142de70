"""Multiplied linear layers: every feature times its own factor, in the order of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.stage.loaded_model import load_model
from actors.stage.models.config import Multipliers
from actors.stage.spec import StageSpec
from actors.stage.weights.multipliers import MultipliedLinear, multiplied
from kernels.torch.backend import TorchBackend

MULTIPLIERS = Multipliers(
    attention=2.0, mixer=3.0, mixer_inputs=(5.0, 7.0, 11.0, 13.0, 17.0), gate=19.0, mlp=23.0
)


def test_results_are_rounded_to_the_type_of_the_layer() -> None:
    linear = TorchBackend().pack_linear(torch.eye(4, dtype=torch.bfloat16), None)
    made = MultipliedLinear(linear, torch.tensor([0.3, 1.0, 2.0, 3.0]))
    x = torch.full((1, 4), 1.5, dtype=torch.bfloat16)
    assert (made.in_features, made.out_features) == (4, 4)
    assert made(x).tolist() == [[torch.tensor(0.45).bfloat16().item(), 1.5, 3.0, 4.5]]
    assert made.forward_f32(x).dtype == torch.float32


def test_each_part_has_its_factor(tiny_model: Callable[..., Path]) -> None:
    """Of two groups of 12 features, 48 values, 48 gates and 4 steps."""
    spec = StageSpec(str(tiny_model("falcon-h1")), backend="torch", block_size=4, max_model_len=64)
    layer = load_model(spec, lambda _: None).weights.layers[0]
    twice, x = multiplied(layer, MULTIPLIERS), torch.randn(3, 64)
    assert layer.beside is not None
    assert twice.beside is not None
    assert layer.gate_up is not None
    assert twice.gate_up is not None
    inputs = twice.beside.inputs(x) / layer.beside.inputs(x)
    wanted = [5.0] * 24 + [7.0] * 24 + [11.0] * 48 + [13.0] * 48 + [17.0] * 4
    torch.testing.assert_close(inputs, torch.tensor([wanted] * 3))
    gates = twice.gate_up(x) / layer.gate_up(x)
    torch.testing.assert_close(gates, torch.tensor([[19.0] * 96 + [1.0] * 96] * 3))
    with pytest.raises(ValueError, match="layers with an MLP"):
        multiplied(replace(layer, gate_up=None), MULTIPLIERS)
