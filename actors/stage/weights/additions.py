"""Loads what layers of Gemma 4 have beside those of other families (`models/additions.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from actors.stage.models.additions import LayerAdditions, LayerInput
from actors.stage.models.config import LayerKind
from actors.stage.models.embedding import LayerInputs
from actors.stage.weights.linears import LinearLoader
from actors.stage.weights.source import WHOLE
from kernels.layer_weights import Linear


def load_layer_inputs(loader: LinearLoader) -> LayerInputs | None:
    """The projection is never quantized, nor are the matrices of each layer's input: they are
    small, and their errors would enter every layer."""
    config, size = loader.config, loader.config.layer_input_size
    if not size:
        return None
    names, hidden, width = config.names.additions, config.hidden_size, config.num_layers * size
    return LayerInputs(
        table_VX=loader.vocabulary(names.inputs, width),
        scale=torch.tensor(math.sqrt(size), dtype=loader.dtype).item(),
        projection=_whole(loader, names.inputs_projection, (width, hidden)),
        projection_scale=hidden**-0.5,
        norm_P=loader.fetch(f"{names.inputs_norm}.weight", (size,), dtype=torch.float32),
        vocab_start=loader.split.vocab[0],
    )


def load_additions(
    loader: LinearLoader, kinds: Sequence[LayerKind], layer: int
) -> LayerAdditions | None:
    """loader: of this layer's sizes. kinds: of all layers of the model, or none."""
    if not kinds:
        return None
    config, names, kind = loader.config, loader.config.names.additions, kinds[layer]
    prefix, hidden, size = (
        config.names.layer.format(layer),
        config.hidden_size,
        config.layer_input_size,
    )

    def norm(name: str) -> torch.Tensor:
        return loader.fetch(f"{prefix}{name}.weight", (hidden,), dtype=torch.float32)

    given, beside = None, config.has_experts(layer) and config.experts_beside
    if size:
        given = LayerInput(
            gate=_whole(loader, prefix + names.input_gate, (size, hidden)),
            projection=_whole(loader, prefix + names.input_projection, (hidden, size)),
            norm_H=norm(names.input_norm),
            number=layer,
        )
    norms_values = config.value_norm and kind.names.k is not None
    return LayerAdditions(
        num_kv_heads=loader.split.num_kv_heads,
        head_dim=kind.head_dim,
        kv_source=kind.kv_source - loader.split.layers[0],
        has_cache=kind.kv_source == layer,
        value_norm_D=torch.ones(kind.head_dim, device=loader.device) if norms_values else None,
        mlp_norm_H=norm(names.mlp_norm) if beside else None,
        experts_norm_H=norm(names.experts_norm) if beside else None,
        input=given,
        scalar_1=loader.fetch(prefix + names.scalar, (1,)) if config.layer_scalars else None,
    )


def _whole(loader: LinearLoader, name: str, shape: tuple[int, int]) -> Linear:
    return loader.backend.pack_linear(loader.dense(name, shape, WHOLE), None)
