"""The weights of one decoder layer, packed for a backend. Shape suffixes as in
`kernels.interface`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.adapters import NO_ADAPTERS, LayerAdapters
from kernels.layer_form import BY_SOFTMAX, Routing
from kernels.recurrence import Mixer


class Linear(Protocol):
    """A weight packed once for this backend."""

    in_features: int
    out_features: int

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:  # -> x_TO
        ...

    def forward_f32(self, x_TK: torch.Tensor) -> torch.Tensor:
        """x_TO in float32, without rounding to the dtype of x where the backend can; else as
        `__call__`. For logits, among which rounding would create ties."""
        ...


class HeadLinears(Protocol):
    """One weight per head."""

    def __call__(self, x_TNK: torch.Tensor) -> torch.Tensor:  # -> y_TNO
        ...


@dataclass(slots=True)
class LatentWeights:
    """What latent attention has beside `LayerWeights.qkv`, which gives a token's queries (or their
    latent), its latent of rank C and the key that is rotated.

    The cache holds both as one key/value head, whose features `order_D` takes from the rotated key
    followed by the latent. Products with the heads' keys and values are applied to queries and
    results instead ("absorbed"). widths: of the three parts of `qkv`. query_dim: of a head. eps: of
    the norms.
    """

    widths: tuple[int, int, int]
    query_dim: int
    query_norm_K: torch.Tensor | None
    query_up: Linear | None
    norm_C: torch.Tensor
    eps: float
    order_D: torch.Tensor
    queries: HeadLinears  # of a head -> of the cache
    values: HeadLinears  # a head's sum of the cache's values -> its result


@dataclass(slots=True)
class SharedExpert:
    """An MLP of every token beside the routed experts, of a size of its own.

    gate: one logit, whose sigmoid scales the output; None: the output counts as it is.
    """

    gate_up: Linear
    down: Linear
    gate: Linear | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Experts:
    """The experts of an MoE layer: each token is routed to the `experts_per_token` experts of the
    highest score, and their outputs are summed by it, as `routing` says.

    renormalize: the weights of the selected experts are scaled to sum to 1.
    correction_bias_E: float32, added to the scores that choose experts, but not to their weights.
    shared: its output is added.
    wide_router: it computes in float32, whatever the type of the model.
    router_norm_H, input_norm_H: RMS norms that the router and the experts have of their input, each
    its own. scales_E: float32, of the experts' weights, after all else.
    scales_inputs: instead, an expert's input is scaled by the sigmoid of its logit, and outputs are
    summed as they are, with that of a last expert, which the router lacks and every token has.
    """

    router: Linear  # out: one logit per expert
    gate_ups: Sequence[Linear]
    downs: Sequence[Linear]
    experts_per_token: int
    renormalize: bool
    scales_inputs: bool = False
    routing: Routing = BY_SOFTMAX
    correction_bias_E: torch.Tensor | None = None
    shared: SharedExpert | None = None
    wide_router: bool = False
    router_norm_H: torch.Tensor | None = None
    input_norm_H: torch.Tensor | None = None
    scales_E: torch.Tensor | None = None

    @property
    def weighted_per_token(self) -> int:
        """Experts of a token whose outputs `kernels.torch.moe.mixed` sums by weight at once."""
        return 1 if self.scales_inputs else self.experts_per_token


@dataclass(slots=True)
class MixerBeside:
    """A mixer beside attention, which reads the same, and its linear layers."""

    inputs: Linear
    mixer: Mixer
    out: Linear


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer, packed. Norms that a model lacks are None.

    input_norm and post_norm come before attention and before the MLP; attention_out_norm and
    mlp_out_norm norm their results. All RMS norms may be float32 in a model of half precision (then
    rounded once, after the weight). cos_sin_PD: the layer's rotation, where layers differ.
    query_scales_P: float32, of queries by position, after the rotation. latent: where it has one.
    gates: its sigmoid multiplies the result of attention; or of linear attention, a rate and a
    decay of every head, before their functions. mixer: in place of attention. beside: added to the
    result of `out`. A layer may lack its MLP.
    """

    input_norm_H: torch.Tensor | None
    qkv: Linear  # out: (N + 2 G) * D, rows ordered q, k, v, or q alone; or as `latent`, `mixer` say
    out: Linear
    post_norm_H: torch.Tensor | None
    gate_up: Linear | None  # out: 2 I, rows ordered gate, up; or up alone
    down: Linear | None
    q_norm_D: torch.Tensor | None = None
    k_norm_D: torch.Tensor | None = None
    sliding_window: int | None = None
    sinks_N: torch.Tensor | None = None
    input_norm_bias_H: torch.Tensor | None = None
    post_norm_bias_H: torch.Tensor | None = None
    attention_out_norm_H: torch.Tensor | None = None
    mlp_out_norm_H: torch.Tensor | None = None
    cos_sin_PD: torch.Tensor | None = None
    query_scales_P: torch.Tensor | None = None
    latent: LatentWeights | None = None
    gates: Linear | None = None
    mixer: Mixer | None = None
    beside: MixerBeside | None = None
    experts: Experts | None = None  # in place of gate_up and down, or beside them
    adapters: LayerAdapters = NO_ADAPTERS

    @property
    def has_mlp(self) -> bool:
        return self.down is not None or self.experts is not None

    @property
    def may_fuse(self) -> bool:
        """Whether it is among those that `DecoderStack` is made of."""
        others = (self.latent, self.mixer, self.beside, self.gates)
        return self.has_mlp and not any(others)
