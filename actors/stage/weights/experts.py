"""Loads a rank's part of the mixture of experts of one layer."""

from __future__ import annotations

import torch

from actors.stage.models.split import Range
from actors.stage.weights.linears import LinearLoader
from actors.stage.weights.names import (
    Piece,
    correction_bias_shape,
    expert_prefixes,
    shared_expert_pieces,
)
from actors.stage.weights.source import WHOLE
from kernels.layer_weights import Experts, Linear, SharedExpert


def load_experts(loader: LinearLoader, prefix: str) -> Experts:
    """This rank's part of every expert. The router, its correction and the gate of a shared expert
    are whole and never quantized."""
    config, names, inner = loader.config, loader.config.names, loader.split.expert_inner
    wide = torch.float32 if config.wide_router else None
    bias_E = loader.bias(prefix, names.router, None)
    router = loader.backend.pack_linear(_whole(loader, prefix, names.router, wide), bias_E)
    experts = [_expert(loader, prefix, expert, inner) for expert in expert_prefixes(config)]
    gate_ups, downs = zip(*experts, strict=True)
    return Experts(
        router,
        gate_ups,
        downs,
        config.experts_per_token,
        config.normalizes_expert_weights,
        config.scales_expert_inputs,
        config.routing,
        _correction_bias(loader, prefix),
        _shared_expert(loader, prefix),
        config.wide_router,
        *_beside(loader, prefix),
    )


def _beside(loader: LinearLoader, prefix: str) -> tuple[torch.Tensor | None, ...]:
    """Of experts beside an MLP: norms of the router's input and of theirs, and their scales. The
    former has no weights, but a scale in units of the hidden size."""
    config, names = loader.config, loader.config.names.additions
    if not config.experts_beside:
        return ()
    hidden, wide = config.hidden_size, torch.float32
    scale_H = loader.fetch(prefix + names.router_scale, (hidden,), dtype=wide)
    norm_H = loader.fetch(f"{prefix}{names.experts_input_norm}.weight", (hidden,), dtype=wide)
    scales_E = loader.fetch(prefix + names.expert_scales, (config.num_experts,), dtype=wide)
    return scale_H * hidden**-0.5, norm_H, scales_E


def _expert(loader: LinearLoader, prefix: str, expert: str, inner: Range) -> tuple[Linear, Linear]:
    names = loader.config.names
    pieces = [Piece(expert + name, inner) for name in names.expert_inputs]
    gate_up = loader.column_parallel(prefix, pieces)
    return gate_up, loader.row_parallel(prefix, expert + names.expert_down, inner)


def _shared_expert(loader: LinearLoader, prefix: str) -> SharedExpert | None:
    config, names = loader.config, loader.config.names
    if not config.shared_expert_size:
        return None
    inner = loader.split.shared_inner
    pieces, down_name = shared_expert_pieces(config, inner)
    gate_up = loader.column_parallel(prefix, pieces)
    down = loader.row_parallel(prefix, down_name, inner)
    gate = None
    if names.shared_gate is not None:
        gate = loader.backend.pack_linear(_whole(loader, prefix, names.shared_gate), None)
    return SharedExpert(gate_up, down, gate)


def _whole(
    loader: LinearLoader, prefix: str, name: str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return loader.dense(prefix + name, loader.shapes[name][0], WHOLE, dtype=dtype)


def _correction_bias(loader: LinearLoader, prefix: str) -> torch.Tensor | None:
    """In float32 in a model of half precision, too: experts' biases differ by less than its
    steps."""
    config, name = loader.config, loader.config.names.correction_bias
    if name is None:
        return None
    shape = correction_bias_shape(config)
    return loader.fetch(prefix + name, shape, dtype=torch.float32).flatten()
