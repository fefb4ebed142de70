"""Linear layers whose results are multiplied (Falcon-H1): their weights are kept as stored."""

from __future__ import annotations

from dataclasses import replace

import torch

from actors.stage.models.config import Multipliers
from actors.stage.models.mixers import Mamba2Mixer
from kernels.layer_weights import LayerWeights, Linear, MixerBeside


class MultipliedLinear:
    """A `Linear` times factors of its features; float32, results are rounded once more."""

    def __init__(self, linear: Linear, factors_O: torch.Tensor | float) -> None:
        self._linear, self._factors_O = linear, factors_O
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        y_TO = self._linear(x_TK)
        return (y_TO.float() * self._factors_O).to(y_TO.dtype)

    def forward_f32(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._linear.forward_f32(x_TK) * self._factors_O


def multiplied(w: LayerWeights, by: Multipliers) -> LayerWeights:
    """The layer with these multipliers. Raises ValueError for one without a gated MLP."""
    if w.gate_up is None or w.down is None or w.input_norm_H is None:
        raise ValueError("multipliers are of layers with an MLP")
    device, inner = w.input_norm_H.device, w.down.in_features
    gate_up_O = torch.tensor([by.gate] * inner + [1.0] * inner, device=device)
    return replace(
        w,
        out=MultipliedLinear(w.out, by.attention),
        gate_up=MultipliedLinear(w.gate_up, gate_up_O),
        down=MultipliedLinear(w.down, by.mlp),
        beside=None if w.beside is None else _beside(w.beside, by, device),
    )


def _beside(beside: MixerBeside, by: Multipliers, device: torch.device) -> MixerBeside:
    if not isinstance(beside.mixer, Mamba2Mixer):
        raise TypeError("multipliers are of the inputs of Mamba-2")
    form = beside.mixer.form
    keys, values = form.num_key_heads * form.key_dim, form.num_heads * form.value_dim
    widths = torch.tensor([keys, keys, values, values, form.num_heads], device=device)
    factors_O = torch.tensor(by.mixer_inputs, device=device).repeat_interleave(widths)
    return replace(
        beside,
        inputs=MultipliedLinear(beside.inputs, factors_O),
        out=MultipliedLinear(beside.out, by.mixer),
    )
