"""Shapes of the tensors that layers of Gemma 4 have beside those of other families."""

from __future__ import annotations

from actors.stage.models.config import DecoderConfig

Shapes = dict[str, tuple[int, ...]]


def addition_shapes(config: DecoderConfig) -> Shapes:
    """Tensors of the inputs of all layers, as stored."""
    names, size = config.names.additions, config.layer_input_size
    if not size:
        return {}
    width = config.num_layers * size
    return {
        f"{names.inputs}.weight": (config.vocab_size, width),
        f"{names.inputs_projection}.weight": (width, config.hidden_size),
        f"{names.inputs_norm}.weight": (size,),
    }


def layer_addition_shapes(config: DecoderConfig, experts: bool) -> Shapes:
    """Tensors of one layer as stored, named without its prefix. experts: it has a mixture."""
    names, hidden, size = config.names.additions, config.hidden_size, config.layer_input_size
    shapes: Shapes = {}
    if size:
        shapes[f"{names.input_gate}.weight"] = (size, hidden)
        shapes[f"{names.input_projection}.weight"] = (hidden, size)
        shapes[f"{names.input_norm}.weight"] = (hidden,)
    if config.layer_scalars:
        shapes[names.scalar] = (1,)
    if experts and config.experts_beside:
        for norm in (names.mlp_norm, names.experts_norm, names.experts_input_norm):
            shapes[f"{norm}.weight"] = (hidden,)
        shapes[names.router_scale] = (hidden,)
        shapes[names.expert_scales] = (config.num_experts,)
    return shapes
