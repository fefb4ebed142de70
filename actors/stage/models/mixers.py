"""Layers that keep a state of fixed size in place of keys and values, between their projections.

Shape suffixes as in `kernels.recurrence`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from actors.transport.group import RankGroup
from kernels.adapters import AdapterModule, LayerAdapters
from kernels.huge_pages import zeros
from kernels.interface import Backend, Batch
from kernels.layer_weights import Linear, MixerBeside
from kernels.recurrence import Mixer, Recurrence, StateLayer, StateRows

AllReduce = Callable[[torch.Tensor], torch.Tensor]
# A linear layer with its adapters of an input.
Apply = Callable[[Linear, AdapterModule | None, torch.Tensor, Batch], torch.Tensor]


@dataclass(slots=True, kw_only=True)
class _WithMatrices:
    """A convolution, then a recurrence.

    log_decay_N: below 0, of a step of length 1; step_bias_N: of its length. Both float32.
    """

    backend: Backend
    form: Recurrence
    conv_JC: torch.Tensor
    log_decay_N: torch.Tensor
    step_bias_N: torch.Tensor
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
        return StateLayer(zeros(inputs, self.dtype, device), zeros(matrices, torch.float32, device))


@dataclass(slots=True, kw_only=True)
class LinearAttentionMixer(_WithMatrices):
    """Linear attention by the gated delta rule (Qwen3-Next, 2025). norm_D: of every head's
    result."""

    norm_D: torch.Tensor

    def __call__(
        self, projected_TX: torch.Tensor, gates_TX: torch.Tensor | None, layer: StateLayer,
        rows: StateRows, all_reduce: AllReduce,
    ) -> torch.Tensor:  # fmt: skip
        """See `kernels.recurrence.Mixer`. Raises ValueError without gates."""
        if gates_TX is None:
            raise ValueError("linear attention has a rate and a decay of every head")
        form, backend = self.form, self.backend
        qkv_TC, z_TX = projected_TX.tensor_split((form.num_channels,), dim=1)
        qkv_TC = backend.causal_conv(qkv_TC, self.conv_JC, None, layer, rows, silu=True)
        rates_TN, steps_TN = gates_TX.chunk(2, dim=1)
        steps_TN = softplus(steps_TN.float() + self.step_bias_N)
        decays_TN = (self.log_decay_N * steps_TN).exp()
        rates_TN = sigmoid(rates_TN.float()).to(self.dtype).float()  # rounded to the model's type
        out_TX = backend.recurrence(qkv_TC, decays_TN, rates_TN, layer, rows, form)
        normed_RD = backend.rms_norm(out_TX.view(-1, form.value_dim), self.norm_D, self.eps)
        return (normed_RD.view(out_TX.shape).float() * silu(z_TX.float())).to(self.dtype)


@dataclass(slots=True, kw_only=True)
class Mamba2Mixer(_WithMatrices):
    """Mamba-2 (Dao and Gu, 2024). The projection gives queries, keys, values, gates of results and
    the lengths of steps, which are rates too.

    conv_bias_C, norm_X: float32; the norm, if there is one, is of num_norms equal parts of this
    rank's features, or one of all ranks' features. ones_X: as wide as a part. skip_X: float32,
    factors by which values are added to results.
    """

    conv_bias_C: torch.Tensor | None
    step_limits: tuple[float, float]
    skip_X: torch.Tensor
    ones_X: torch.Tensor
    norm_X: torch.Tensor | None
    num_norms: int
    num_ranks: int  # which share a norm

    def __call__(
        self, projected_TX: torch.Tensor, gates_TX: torch.Tensor | None, layer: StateLayer,
        rows: StateRows, all_reduce: AllReduce,
    ) -> torch.Tensor:  # fmt: skip
        """See `kernels.recurrence.Mixer`."""
        form, backend = self.form, self.backend
        widths = [form.num_channels, form.num_heads * form.value_dim, form.num_heads]
        qkv_TC, z_TX, steps_TN = torch.split(projected_TX, widths, dim=1)
        qkv_TC = backend.causal_conv(qkv_TC, self.conv_JC, self.conv_bias_C, layer, rows, silu=True)
        steps_TN = softplus(steps_TN.float() + self.step_bias_N).clamp(*self.step_limits)
        decays_TN = (self.log_decay_N * steps_TN).exp()
        out_TX = backend.recurrence(qkv_TC, decays_TN, steps_TN, layer, rows, form)
        out_TX = out_TX.float() + self.skip_X * qkv_TC[:, -len(self.skip_X) :].float()
        gated_TX = out_TX * silu(z_TX.float())
        if self.norm_X is not None:
            gated_TX = self._normed(gated_TX, self.norm_X, all_reduce)
        return gated_TX.to(self.dtype)

    def _normed(
        self, x_TX: torch.Tensor, norm_X: torch.Tensor, all_reduce: AllReduce
    ) -> torch.Tensor:
        if self.num_ranks == 1:
            x_RX = x_TX.view(len(x_TX) * self.num_norms, -1)
            return self.backend.rms_norm(x_RX, self.ones_X, self.eps).view(x_TX.shape) * norm_X
        squares_T1 = all_reduce(x_TX.square().sum(-1, keepdim=True))
        mean_T1 = squares_T1 / (self.num_ranks * x_TX.shape[1])
        return x_TX * torch.rsqrt(mean_T1 + self.eps) * norm_X


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
        return StateLayer(zeros(size, self.dtype, device))

    def __call__(
        self, projected_TX: torch.Tensor, gates_TX: torch.Tensor | None, layer: StateLayer,
        rows: StateRows, all_reduce: AllReduce,
    ) -> torch.Tensor:  # fmt: skip
        """See `kernels.recurrence.Mixer`."""
        before_TC, after_TC, value_TC = projected_TX.chunk(3, dim=1)
        inputs_TC = before_TC * value_TC
        return after_TC * self.backend.causal_conv(
            inputs_TC, self.conv_JC, self.conv_bias_C, layer, rows, silu=False
        )


def mixed(
    mixer: Mixer, projected_TX: torch.Tensor, gates_TX: torch.Tensor | None, layer: object,
    batch: Batch, ranks: RankGroup,
) -> torch.Tensor:  # fmt: skip
    """Raises RuntimeError where the batch or the layer has no states."""
    if batch.states is None or not isinstance(layer, StateLayer):
        raise RuntimeError("a layer with a state needs the rows of states")
    return mixer(projected_TX, gates_TX, layer, batch.states, ranks.all_reduce)


def mixed_beside(
    beside: MixerBeside, adapters: LayerAdapters, x_TH: torch.Tensor, layer: object, batch: Batch,
    ranks: RankGroup, apply: Apply,
) -> torch.Tensor:  # fmt: skip
    """What is added to the result of attention of the same input."""
    projected_TX = apply(beside.inputs, adapters.beside_inputs, x_TH, batch)
    mixed_TX = mixed(beside.mixer, projected_TX, None, layer, batch, ranks)
    return apply(beside.out, adapters.beside_out, mixed_TX, batch)


# torch's own round the last elements of a tensor otherwise than those before, so that a token's
# bits would depend on the batch.


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


def softplus(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) + (-x.abs()).exp().log1p()
