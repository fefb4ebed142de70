"""What layers of Gemma 4 do beside those of other families.

Values are normed; a layer may attend to the cache of one before it; it may have an MLP beside its
experts, an input of its own from each token's embedding, and a scalar that multiplies its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from actors.transport.group import RankGroup
from kernels.interface import AttentionShape, Backend, KVLayer
from kernels.layer_form import LayerForm
from kernels.layer_weights import LayerWeights, Linear
from kernels.recurrence import StateLayer


@dataclass(slots=True)
class LayerInput:
    """What a layer adds to its result: the gated input, projected and normed. The matrices are
    whole on every rank. number: of the layer among the model's."""

    gate: Linear
    projection: Linear
    norm_H: torch.Tensor
    number: int


@dataclass(slots=True)
class LayerAdditions:
    """Of one layer. num_kv_heads: of this rank. has_cache: of its own; else it has only queries,
    which attend to the cache of layer kv_source of this stage. value_norm_D: of ones, or None.
    mlp_norm and experts_norm: of both results, where it has an MLP and experts. scalar_1: of its
    result."""

    num_kv_heads: int
    head_dim: int
    kv_source: int
    has_cache: bool
    value_norm_D: torch.Tensor | None
    mlp_norm_H: torch.Tensor | None
    experts_norm_H: torch.Tensor | None
    input: LayerInput | None
    scalar_1: torch.Tensor | None


def shapes_of(
    shape: AttentionShape,
    layers: Sequence[LayerWeights],
    additions: Sequence[LayerAdditions | None],
) -> list[AttentionShape]:
    """The shape of every layer; shape: of those without additions, but for what differs anyway."""
    shapes = [replace(shape, sliding_window=w.sliding_window, sinks_N=w.sinks_N) for w in layers]
    return [
        one if own is None else replace(one, num_kv_heads=own.num_kv_heads, head_dim=own.head_dim)
        for one, own in zip(shapes, additions, strict=True)
    ]


def cached(
    shapes: Sequence[AttentionShape],
    layers: Sequence[LayerWeights],
    additions: Sequence[LayerAdditions | None],
) -> list[AttentionShape]:
    """The shapes of the layers that have a cache."""
    parts = zip(shapes, layers, additions, strict=True)
    return [shape for shape, w, own in parts if w.mixer is None and (own is None or own.has_cache)]


def caches_of(
    additions: Sequence[LayerAdditions | None], caches: Sequence[KVLayer | StateLayer]
) -> list[KVLayer | StateLayer]:
    """For every layer, the cache that it attends to, of those of layers that have one."""
    rest, found = iter(caches), list[KVLayer | StateLayer]()
    for own in additions:
        found.append(next(rest) if own is None or own.has_cache else found[own.kv_source])
    return found


def norm_values(
    qkv_TX: torch.Tensor, own: LayerAdditions, backend: Backend, eps: float
) -> torch.Tensor:
    """q, k and v with each head of v normed, which may overwrite them."""
    if own.value_norm_D is None:
        return qkv_TX
    width = own.num_kv_heads * own.head_dim
    values_TX = qkv_TX[:, -width:]
    values_XD = values_TX.contiguous().view(-1, own.head_dim)
    values_TX.copy_(backend.rms_norm(values_XD, own.value_norm_D, eps).view(-1, width))
    return qkv_TX


def end_layer(
    own: LayerAdditions,
    w: LayerWeights,
    mlp_TH: torch.Tensor,
    residual_TH: torch.Tensor,
    x_TX: torch.Tensor,
    backend: Backend,
    group: RankGroup,
    form: LayerForm,
) -> None:
    """Turn residual_TH into the layer's result. mlp_TH: this rank's part of what the MLP gives of
    it. x_TX: the stage's input, as `LayerInputs.join` returned it."""

    def normed(x_TH: torch.Tensor, norm_H: torch.Tensor | None) -> torch.Tensor:
        return x_TH if norm_H is None else backend.rms_norm(x_TH, norm_H, form.eps)

    y_TH = normed(group.all_reduce(mlp_TH), own.mlp_norm_H)
    if w.experts is not None:
        mixture_TH = group.all_reduce(backend.moe(residual_TH, w.experts, form))
        y_TH = y_TH + normed(mixture_TH, own.experts_norm_H)
    residual_TH += normed(y_TH, w.mlp_out_norm_H)
    if own.input is not None:
        size = own.input.gate.out_features
        first = residual_TH.shape[1] + own.input.number * size
        gate_TP = backend.activate(own.input.gate(residual_TH), form.activation, gated=False)
        gated_TP = gate_TP * x_TX[:, first : first + size]
        residual_TH += normed(own.input.projection(gated_TP), own.input.norm_H)
    if own.scalar_1 is not None:
        residual_TH *= own.scalar_1
