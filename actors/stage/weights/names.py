"""The Hugging Face tensor names of the decoder family, with their shapes."""

from __future__ import annotations

from actors.stage.models.config import DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

# Buffers of old checkpoints, computed here from the config instead.
IGNORED_ENDINGS: tuple[str, ...] = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "masked_bias",
    "attn.bias",
)


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer, named behind `layer_prefix`."""
    hidden, inner = config.hidden_size, config.inner_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv))}
    if config.out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.mlp_bias:
        shapes |= {f"mlp.{p}_proj.bias": (inner,) for p in ("gate", "up")}
        shapes["mlp.down_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{p}_norm.weight": (config.head_dim,) for p in ("q", "k")}
    return shapes


def all_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model. A tied head may also be stored; it is then not read."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
        HEAD: (config.vocab_size, config.hidden_size),
    }
    per_layer = layer_shapes(config)
    for layer in range(config.num_layers):
        shapes |= {layer_prefix(layer) + name: shape for name, shape in per_layer.items()}
    return shapes
