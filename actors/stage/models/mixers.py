"""Layers that keep a state of fixed size in place of keys and values, between their projections.

Shape suffixes as in `kernels.recurrence`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.interface import Backend
from kernels.layer_weights import Linear
from kernels.recurrence import Recurrence, StateLayer, StateRows


@dataclass(slots=True)
class LinearAttentionMixer:
    """Linear attention by the gated delta rule (Qwen3-Next, 2025).

    gates: of the hidden state -> a rate and a decay of every head, before their functions.
    log_decay_N: below 0, of a step of length 1; step_bias_N: of its length. Both float32.
    norm_D: of every head's result.
    """

    backend: Backend
    form: Recurrence
    gates: Linear
    conv_JC: torch.Tensor
    log_decay_N: torch.Tensor
    step_bias_N: torch.Tensor
    norm_D: torch.Tensor
    eps: float
    dtype: torch.dtype

    @property
    def state_bytes(self) -> int:
        form, inputs = self.form, (len(self.conv_JC) - 1) * self.form.num_channels
        matrices = form.num_heads * form.key_dim * form.value_dim
        return inputs * self.dtype.itemsize + matrices * torch.float32.itemsize

    def allocate(self, num_rows: int, device: torch.device) -> StateLayer:
        form = self.form
        inputs = (num_rows, len(self.conv_JC) - 1, form.num_channels)
        matrices = (num_rows, form.num_heads, form.key_dim, form.value_dim)
        return StateLayer(
            torch.zeros(inputs, dtype=self.dtype, device=device),
            torch.zeros(matrices, dtype=torch.float32, device=device),
        )

    def __call__(
        self, projected_TX: torch.Tensor, x_TH: torch.Tensor, layer: StateLayer, rows: StateRows
    ) -> torch.Tensor:
        """See `kernels.recurrence.Mixer`."""
        form, backend = self.form, self.backend
        qkv_TC, z_TX = projected_TX.tensor_split((form.num_channels,), dim=1)
        qkv_TC = backend.causal_conv(qkv_TC, self.conv_JC, None, layer, rows, silu=True)
        rates_TN, steps_TN = self.gates(x_TH).chunk(2, dim=1)
        steps_TN = functional.softplus(steps_TN.float() + self.step_bias_N)
        decays_TN = (self.log_decay_N * steps_TN).exp()
        rates_TN = rates_TN.sigmoid().float()  # rounded to the model's type
        out_TX = backend.recurrence(qkv_TC, decays_TN, rates_TN, layer, rows, form)
        normed_RD = backend.rms_norm(out_TX.view(-1, form.value_dim), self.norm_D, self.eps)
        gated_TX = normed_RD.view(out_TX.shape).float() * functional.silu(z_TX.float())
        return gated_TX.to(self.dtype)


@dataclass(slots=True)
class ShortConvMixer:
    """A gated convolution (LFM2, 2025). conv_bias_C: float32."""

    backend: Backend
    conv_JC: torch.Tensor
    conv_bias_C: torch.Tensor | None
    dtype: torch.dtype

    @property
    def state_bytes(self) -> int:
        num_taps, num_channels = self.conv_JC.shape
        return (num_taps - 1) * num_channels * self.dtype.itemsize

    def allocate(self, num_rows: int, device: torch.device) -> StateLayer:
        num_taps, num_channels = self.conv_JC.shape
        size = (num_rows, num_taps - 1, num_channels)
        return StateLayer(torch.zeros(size, dtype=self.dtype, device=device))

    def __call__(
        self, projected_TX: torch.Tensor, x_TH: torch.Tensor, layer: StateLayer, rows: StateRows
    ) -> torch.Tensor:
        """See `kernels.recurrence.Mixer`."""
        before_TC, after_TC, value_TC = projected_TX.chunk(3, dim=1)
        inputs_TC = before_TC * value_TC
        return after_TC * self.backend.causal_conv(
            inputs_TC, self.conv_JC, self.conv_bias_C, layer, rows, silu=False
        )
