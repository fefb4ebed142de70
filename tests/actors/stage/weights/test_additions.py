"""Scales, norms and matrices of what layers of Gemma 4 have beside others, as they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from actors.stage.loaded_model import LoadedModel, load_model
from actors.stage.spec import StageSpec
from kernels.torch.linear import TorchLinear


def loaded(folder: Path, **options: str) -> LoadedModel:
    return load_model(StageSpec(str(folder), backend="torch", **options), lambda _: None)


def test_matrices_of_inputs_stay_whole_and_unquantized(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("gemma4-inputs")
    stored = load_file(folder / "model.safetensors")
    model = loaded(folder, quantization="int8")
    assert model.num_parameters == sum(tensor.numel() for tensor in stored.values())
    inputs = model.weights.layer_inputs
    assert inputs is not None
    assert torch.equal(inputs.table_VX, stored["model.embed_tokens_per_layer.weight"])
    assert (inputs.scale, inputs.projection_scale) == (torch.tensor(12.0).sqrt().item(), 64**-0.5)
    for number, own in enumerate(model.weights.additions):
        assert own is not None
        assert own.input is not None
        assert isinstance(own.input.gate, TorchLinear)
        prefix = f"model.layers.{number}."
        wanted = stored[f"{prefix}per_layer_input_gate.weight"]
        assert torch.equal(own.input.gate(torch.eye(64)).T, wanted)
        assert own.input.number == number
        assert own.scalar_1 is not None
        assert torch.equal(own.scalar_1, stored[f"{prefix}layer_scalar"])
        assert (own.value_norm_D is None) == (number >= 3)


def test_a_router_has_a_norm_and_scales_of_its_own(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("gemma4")
    stored = load_file(folder / "model.safetensors")
    for number, layer in enumerate(loaded(folder).weights.layers):
        prefix, experts = f"model.layers.{number}.", layer.experts
        assert experts is not None
        assert experts.router_norm_H is not None
        assert experts.input_norm_H is not None
        assert experts.scales_E is not None
        scale = stored[f"{prefix}router.scale"]
        torch.testing.assert_close(experts.router_norm_H, scale / 8)
        norm = stored[f"{prefix}pre_feedforward_layernorm_2.weight"]
        assert torch.equal(experts.input_norm_H, norm)
        assert torch.equal(experts.scales_E, stored[f"{prefix}router.per_expert_scale"])
