"""Families with latent attention."""

from __future__ import annotations

from dataclasses import replace

from actors.stage.models.config import DecoderConfig, Latent
from actors.stage.models.family import Family, in_units
from actors.stage.models.keys import JsonObject, Keys
from actors.stage.models.rope import read_rope, score_factor


def youtu(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Llama with latent attention."""
    return latent(base, keys, interleaved=keys.flag("rope_interleave", True))


def minicpm3(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Multipliers of embedding, residual and logits, and latent attention."""
    depth = base.num_layers**0.5
    config = replace(
        latent(base, keys, value_dim=base.hidden_size // base.num_heads),
        embedding_scale=keys.number("scale_emb"),
        logit_scale=keys.divisor("dim_model_base", base.hidden_size) / base.hidden_size,
        mlp_bias=keys.flag("mlp_bias"),
    )
    return in_units(config, keys.divisor("scale_depth", depth) / depth)


def latent(
    base: DecoderConfig, keys: Keys, *, interleaved: bool = False, value_dim: int | None = None
) -> DecoderConfig:
    """`base` with latent attention in every layer, as DeepSeek-V2 has it. value_dim: where
    config.json has none."""
    part = Latent(
        rank=keys.size("kv_lora_rank"),
        query_rank=int(keys.number("q_lora_rank", 0)),
        plain_dim=keys.size("qk_nope_head_dim"),
        rotated_dim=keys.size("qk_rope_head_dim"),
        value_dim=keys.size("v_head_dim", value_dim),
    )
    keys.only("qk_head_dim", part.query_dim)
    if part.rank % 2:
        raise ValueError(f"kv_lora_rank must be even, not {part.rank}")
    rope = read_rope(keys.values, part.rotated_dim, base.max_positions)
    bias = keys.flag("attention_bias")
    return replace(
        base,
        latent=part,
        num_kv_heads=1,
        head_dim=part.rank + part.rotated_dim,
        qkv_bias=bias,
        out_bias=bias,
        ropes=(replace(rope, interleaved=interleaved),) * base.num_layers,
        attention_scale=part.query_dim**-0.5 * score_factor(keys.values),
    )


_MINICPM3: JsonObject = {
    "dim_model_base": 256, "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "rms_norm_eps": 1e-5, "scale_depth": 1.4, "scale_emb": 12,
    "tie_word_embeddings": True,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "YoutuForCausalLM": Family(youtu, defaults={"tie_word_embeddings": True}, rotates_part=True),
    "MiniCPM3ForCausalLM": Family(minicpm3, defaults=_MINICPM3, rotates_part=True),
}
