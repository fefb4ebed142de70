"""The tensors of a checkpoint: names, shapes, and the rows that make up each projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actors.stage.models.config import DecoderConfig, Latent
from actors.stage.models.rope import feature_order
from actors.stage.models.split import Range, Split
from actors.stage.weights.addition_shapes import addition_shapes, layer_addition_shapes
from actors.stage.weights.attention_names import attending_linear_shapes
from actors.stage.weights.mixer_names import LinearShapes, Shapes, mixer_shapes
from actors.stage.weights.stacked import stacked_shapes


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [begin, end) of a linear layer, by its name in the checkpoint, taken in `order`, which
    may omit some."""

    name: str
    rows: Range
    order: torch.Tensor | None = None


def num_rows(piece: Piece) -> int:
    return piece.rows[1] - piece.rows[0] if piece.order is None else len(piece.order)


def layer_prefix(config: DecoderConfig, layer: int) -> str:
    """Of attention, or a mixer, and its norms."""
    return config.names.layer.format(config.stored_at[layer][0] if config.stored_at else layer)


def mlp_prefix(config: DecoderConfig, layer: int) -> str:
    return config.names.layer.format(config.stored_at[layer][1] if config.stored_at else layer)


def linear_shapes(config: DecoderConfig, experts: bool, mixer: bool = False) -> LinearShapes:
    """Linear layers of one layer. experts: its MLP is a mixture of experts. mixer: it has one in
    place of attention."""
    return attending_linear_shapes(config, mixer) | mlp_linear_shapes(config, experts)


def mlp_linear_shapes(config: DecoderConfig, experts: bool) -> LinearShapes:
    names, hidden, inner = config.names, config.hidden_size, config.inner_size
    shapes: LinearShapes = {}
    if experts:
        biased = config.expert_bias
        shapes[names.router] = ((config.num_experts, hidden), biased)
        size = config.expert_size
        for expert in expert_prefixes(config):
            for name in names.expert_inputs:
                shapes[expert + name] = ((size, hidden), biased)
            shapes[expert + names.expert_down] = ((hidden, size), biased)
        size = config.shared_expert_size
        if size:
            pieces, down = shared_expert_pieces(config, (0, size))
            for piece in pieces:
                width = size if names.shared_gate_up is None else 2 * size
                shapes[piece.name] = ((width, hidden), biased)
            shapes[down] = ((hidden, size), biased)
        if names.shared_gate is not None:
            shapes[names.shared_gate] = ((1, hidden), False)
        if not config.experts_beside:
            return shapes
    if names.gate_up is not None:
        mlp = {names.gate_up: 2 * inner}
    else:
        mlp = {name: inner for name in (names.gate, names.up) if name is not None}
    return {
        **shapes,
        **{name: ((size, hidden), config.mlp_bias) for name, size in mlp.items()},
        names.down: ((hidden, inner), config.mlp_bias),
    }


def expert_prefixes(config: DecoderConfig) -> list[str]:
    """Of a layer's routed experts, and of one that every token has, where it is computed as they
    are."""
    names = config.names
    shared = names.shared_expert if config.scales_expert_inputs else None
    return [*map(names.expert.format, range(config.num_experts)), *([shared] if shared else ())]


def shared_expert_pieces(config: DecoderConfig, rows: Range) -> tuple[list[Piece], str]:
    """A rank's gate and up of the shared expert, and the name of its down."""
    names, prefix = config.names, config.names.shared_expert or ""
    down = prefix + (names.shared_down or names.expert_down)
    if names.shared_gate_up is None:
        return [Piece(prefix + name, rows) for name in names.expert_inputs], down
    size, whole = config.shared_expert_size, prefix + names.shared_gate_up
    return [Piece(whole, rows), Piece(whole, (size + rows[0], size + rows[1]))], down


def correction_bias_shape(config: DecoderConfig) -> tuple[int, ...]:
    return (1, config.num_experts) if config.names.correction_bias_row else (config.num_experts,)


def _stored_mlp(config: DecoderConfig, experts: bool) -> Shapes:
    """Tensors of one layer's MLP and its norms as stored, named without `mlp_prefix`."""
    names = config.names
    linears = mlp_linear_shapes(config, experts)
    shapes: Shapes = {}
    if experts and names.stacked is not None:
        shapes = stacked_shapes(config, names.stacked)
        prefix = names.expert.partition("{}")[0]
        linears = {name: found for name, found in linears.items() if not name.startswith(prefix)}
    shapes |= _stored(config, linears, names.mlp_norm, names.mlp_out_norm)
    shapes |= layer_addition_shapes(config, experts)
    if experts and names.correction_bias is not None:
        shapes[names.correction_bias] = correction_bias_shape(config)
    return shapes


def _stored(config: DecoderConfig, linears: LinearShapes, *norms: str | None) -> Shapes:
    shapes: Shapes = {}
    for name, (shape, biased) in linears.items():
        shapes[f"{name}.weight"] = shape[::-1] if config.names.transposed else shape
        if biased:
            shapes[f"{name}.bias"] = shape[:1]
    for norm in norms:
        if norm is not None:
            shapes |= norm_shapes(config, norm, config.hidden_size)
    return shapes


def _stored_attention(config: DecoderConfig, mixer: bool) -> Shapes:
    """Tensors of one layer's attention or mixer and its norms as stored, named without
    `layer_prefix`."""
    names = config.names
    linears = attending_linear_shapes(config, mixer)
    shapes = _stored(config, linears, names.input_norm, names.attention_out_norm)
    if mixer or config.mixer_beside:
        shapes |= mixer_shapes(config)
    if mixer:
        return shapes
    if names.sinks is not None:
        shapes[names.sinks] = (config.num_heads,)
    if config.latent is not None:
        shapes[f"{names.latent.norm}.weight"] = (config.latent.rank,)
        if config.latent.query_rank:
            shapes[f"{names.latent.query_norm}.weight"] = (config.latent.query_rank,)
    if config.qk_norm in ("head", "whole"):
        whole = config.head_dim if config.qk_norm == "whole" else 0
        shapes[f"{names.q_norm}.weight"] = (config.num_heads * whole or config.head_dim,)
        if names.k is not None:
            shapes[f"{names.k_norm}.weight"] = (config.num_kv_heads * whole or config.head_dim,)
    return shapes


def norm_shapes(config: DecoderConfig, name: str, size: int) -> Shapes:
    endings = ["weight"] * config.norm_weights + ["bias"] * config.norm_bias
    return {f"{name}.{ending}": (size,) for ending in endings}


def all_shapes(config: DecoderConfig) -> Shapes:
    """Every tensor of the model. A tied head may be absent."""
    names = config.names
    shapes: Shapes = {
        f"{names.embedding}.weight": (config.vocab_size, config.hidden_size),
        **norm_shapes(config, names.final_norm, config.hidden_size),
        f"{names.head}.weight": (config.vocab_size, config.hidden_size),
    }
    if config.head_bias:
        shapes[f"{names.head}.bias"] = (config.vocab_size,)
    if names.embedding_norm is not None:
        shapes |= norm_shapes(config, names.embedding_norm, config.hidden_size)
    if names.positions is not None:
        rows = config.max_positions + config.position_offset
        shapes[f"{names.positions}.weight"] = (rows, config.hidden_size)
    shapes |= addition_shapes(config)
    attentions, mlps = (
        {kind: stored(config, kind) for kind in (False, True)}
        for stored in (_stored_attention, _stored_mlp)
    )
    for layer in range(config.num_layers):
        one, mixer, experts = config.at(layer), config.has_mixer(layer), config.has_experts(layer)
        own = one is not config
        attention = _stored_attention(one, mixer) if own else attentions[mixer]
        parts = [(layer_prefix(config, layer), attention)]
        if config.has_mlp(layer):
            mlp = _stored_mlp(one, experts) if own else mlps[experts]
            parts.append((mlp_prefix(config, layer), mlp))
        for prefix, part in parts:
            shapes |= {prefix + name: shape for name, shape in part.items()}
    return shapes


def qkv_pieces(config: DecoderConfig, part: Split) -> list[Piece]:
    """A rank's q, k and v from one or several tensors, features in the order of our rotation; with
    latent attention, what `LatentWeights` says of them."""
    names, dim = config.names, config.head_dim
    if config.latent is not None:
        return _latent_pieces(config, config.latent, part)
    features = feature_order(config.ropes, dim)
    if names.qkv is not None and names.grouped:
        return [_grouped(config, part, features)]
    q_order = heads_in_order(part.num_heads, features)
    if names.qkv is None and names.k is None:
        return [Piece(names.q, part.q, q_order)]
    k_order = heads_in_order(part.num_kv_heads, features)
    if names.qkv is None:
        places = [(names.q, 0), (names.k or "", 0), (names.v, 0)]
    else:
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        places = [(names.qkv, 0), (names.qkv, q), (names.qkv, q + kv)]
    wanted = [(part.q, q_order), (part.kv, k_order), (part.kv, None)]
    if config.attention_gate:
        order = torch.arange(dim) if features is None else features
        wanted[0] = _beside_gates(config, part, order)
    return [
        Piece(name, (start + begin, start + end), order)
        for (name, start), ((begin, end), order) in zip(places, wanted, strict=True)
    ]


def gate_pieces(config: DecoderConfig, part: Split) -> list[Piece]:
    """A rank's gates of attention, if it has them, stored behind the queries of each head."""
    if not config.attention_gate:
        return []
    rows, order = _beside_gates(config, part, config.head_dim + torch.arange(config.head_dim))
    return [Piece(config.names.q, rows, order)]


def _beside_gates(
    config: DecoderConfig, part: Split, features: torch.Tensor
) -> tuple[Range, torch.Tensor]:
    """Rows of a rank's queries with their gates, and where each head's features are in them."""
    starts_N = torch.arange(part.num_heads) * 2 * config.head_dim
    begin, end = part.q
    return (2 * begin, 2 * end), (starts_N[:, None] + features).flatten()


def _latent_pieces(config: DecoderConfig, latent: Latent, part: Split) -> list[Piece]:
    """All of the latents, of which every rank's heads are products."""
    down = Piece(config.names.latent.down, (0, latent.rank + latent.rotated_dim))
    if latent.query_rank:
        return [Piece(config.names.latent.query_down, (0, latent.query_rank)), down]
    begin, end = (edge // config.head_dim * latent.query_dim for edge in part.q)
    return [Piece(config.names.q, (begin, end)), down]


def gate_up_pieces(config: DecoderConfig, part: Split) -> list[Piece]:
    """A rank's gate, if there is one, and up."""
    names, (begin, end) = config.names, part.inner
    if names.gate_up is not None:
        inner = config.inner_size
        rows = (inner + begin, inner + end)
        return [Piece(names.gate_up, (begin, end)), Piece(names.gate_up, rows)]
    return [Piece(name, (begin, end)) for name in (names.gate, names.up) if name is not None]


def _grouped(config: DecoderConfig, part: Split, features: torch.Tensor | None) -> Piece:
    """Each group is its query heads, then its key head, then its value head.
    A rank with fewer query heads than a group reads the whole group and drops the others."""
    dim = config.head_dim
    group = config.num_heads // config.num_kv_heads
    first, last = part.kv[0] // dim, part.kv[1] // dim
    q_heads = range(part.q[0] // dim, part.q[1] // dim)
    width = group + 2
    heads_of_q = [(h // group - first) * width + h % group for h in q_heads]
    heads_of_k = [g * width + group for g in range(last - first)]
    straight_D = torch.arange(dim)
    turned_D = straight_D if features is None else features
    order = torch.cat(
        [head * dim + turned_D for head in (*heads_of_q, *heads_of_k)]
        + [(head + 1) * dim + straight_D for head in heads_of_k]
    )
    rows = (first * width * dim, last * width * dim)
    return Piece(config.names.qkv or "", rows, order)


def heads_in_order(num_heads: int, features: torch.Tensor | None) -> torch.Tensor | None:
    if features is None:
        return None
    starts_N = torch.arange(num_heads) * len(features)
    return (starts_N[:, None] + features).flatten()
