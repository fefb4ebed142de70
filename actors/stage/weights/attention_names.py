"""Shapes of the linear layers of attention, or of what layers have in its place."""

from __future__ import annotations

from actors.stage.models.config import DecoderConfig, Latent
from actors.stage.weights.mixer_names import LinearShapes, mixer_linear_shapes


def attending_linear_shapes(config: DecoderConfig, mixer: bool) -> LinearShapes:
    """Of one layer: (out, in features) and whether there is a bias. mixer: it has one."""
    if mixer:
        return mixer_linear_shapes(config)
    if config.latent is None:
        beside = mixer_linear_shapes(config) if config.mixer_beside else {}
        return _attention_shapes(config) | beside
    return _latent_shapes(config, config.latent)


def _attention_shapes(config: DecoderConfig) -> LinearShapes:
    names, hidden, biased = config.names, config.hidden_size, config.qkv_bias
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if names.qkv is not None:
        inputs = {names.qkv: q + 2 * kv}
    else:
        inputs = {names.q: q * (1 + config.attention_gate)}
        if names.k is not None:
            inputs |= {names.k: kv, names.v: kv}
    shapes = {name: ((size, hidden), biased) for name, size in inputs.items()}
    return {**shapes, names.out: ((hidden, q), config.out_bias)}


def _latent_shapes(config: DecoderConfig, latent: Latent) -> LinearShapes:
    names, hidden, heads = config.names, config.hidden_size, config.num_heads
    queries = heads * latent.query_dim
    shapes: LinearShapes = {names.q: ((queries, hidden), False)}
    if latent.query_rank:
        shapes = {
            names.latent.query_down: ((latent.query_rank, hidden), config.qkv_bias),
            names.latent.query_up: ((queries, latent.query_rank), False),
        }
    keys_and_values = heads * (latent.plain_dim + latent.value_dim)
    return {
        **shapes,
        names.latent.down: ((latent.rank + latent.rotated_dim, hidden), config.qkv_bias),
        names.latent.up: ((keys_and_values, latent.rank), False),
        names.out: ((hidden, heads * latent.value_dim), config.out_bias),
    }
