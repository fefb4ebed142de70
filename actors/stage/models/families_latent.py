"""Families with latent attention."""

from __future__ import annotations

from dataclasses import replace

from actors.stage.models.config import DecoderConfig, Latent
from actors.stage.models.families_deepseek import (
    V3_NAMES,
    deepseek_experts,
    deepseek_v3_experts,
    listed_mixtures,
)
from actors.stage.models.family import Family, in_units, with_growing_queries
from actors.stage.models.keys import JsonObject, Keys
from actors.stage.models.names import LLAMA, StackedNames
from actors.stage.models.rope import read_rope, score_factor
from kernels.layer_form import Routing


def deepseek_v2(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Latent attention; mixtures as in DeepSeek-V3, but chosen and weighted by a softmax."""
    keys.only("scoring_func", "softmax")
    keys.only("norm_topk_prob", False)
    keys.only("topk_method", "greedy", "group_limited_greedy")
    by_group = keys.get("topk_method") == "group_limited_greedy"
    routing = Routing(
        num_groups=keys.size("n_group", 1) if by_group else 1,
        kept_groups=keys.size("topk_group", 1) if by_group else 1,
        best_of_group=1,
        scale=keys.number("routed_scaling_factor", 1.0),
    )
    keys.ignore("n_group", "topk_group")
    config = deepseek_experts(base, keys, routing)
    config = replace(config, mlp_bias=keys.flag("mlp_bias"))
    return latent(config, keys, interleaved=True)


def deepseek_v3(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """DeepSeek-V3, R1 and V3.1, Kimi K2: latent attention, and mixtures whose experts are chosen by
    sigmoid scores with a correction bias."""
    interleaved = keys.flag("rope_interleave", True)
    return latent(deepseek_v3_experts(base, keys), keys, interleaved=interleaved)


def glm4_moe_lite(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """GLM-4.7-Flash: DeepSeek-V3 whose dense layers may be listed."""
    return listed_mixtures(deepseek_v3(base, keys), keys)


def mistral4(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Mistral Small 4: latent attention with queries that grow with the position; mixtures as in
    DeepSeek-V3, but chosen and weighted by a softmax, and stored in two tensors a layer."""
    routing = Routing(
        num_groups=keys.size("n_group", 1),
        kept_groups=keys.size("topk_group", 1),
        least_sum=1e-20,
        scale=keys.number("routed_scaling_factor", 1.0),
    )
    config = replace(deepseek_experts(base, keys, routing), wide_router=False)
    config = latent(config, keys, interleaved=keys.flag("rope_interleave", True))
    return with_growing_queries(config, keys)


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
    rope = read_rope(_of_rotated_part(keys.values), part.rotated_dim, base.max_positions)
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


def _of_rotated_part(values: JsonObject) -> JsonObject:
    """Without `partial_rotary_factor`, which some files have: what is rotated has its own size."""
    rope = {**(values.get("rope_parameters") or {}), "partial_rotary_factor": None}
    return {**values, "rope_parameters": rope, "partial_rotary_factor": None}


_MINICPM3: JsonObject = {
    "dim_model_base": 256, "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "rms_norm_eps": 1e-5, "scale_depth": 1.4, "scale_emb": 12,
    "tie_word_embeddings": True,
}  # fmt: skip

_DEEPSEEK: JsonObject = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_DEEPSEEK_V2: JsonObject = {
    **_DEEPSEEK, "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2,
    "q_lora_rank": 1536, "topk_method": "greedy",
}  # fmt: skip
_DEEPSEEK_V3: JsonObject = {
    **_DEEPSEEK, "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_group": 8,
    "n_routed_experts": 256, "norm_topk_prob": True, "num_experts_per_tok": 8, "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5, "topk_group": 4,
}  # fmt: skip
_GLM4_MOE_LITE: JsonObject = {
    "first_k_dense_replace": 1, "kv_lora_rank": 512, "moe_intermediate_size": 1536,
    "n_routed_experts": 64, "norm_topk_prob": True, "num_experts_per_tok": 4, "q_lora_rank": 768,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8, "v_head_dim": 256,
}  # fmt: skip
_MISTRAL4: JsonObject = {
    "kv_lora_rank": 256, "max_position_embeddings": 1_048_576, "moe_intermediate_size": 2048,
    "n_routed_experts": 128, "norm_topk_prob": True, "num_experts_per_tok": 4, "q_lora_rank": 1024,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip

# The size of what is rotated, by which rotations are read.
_ROTATED = {"head_dim": "qk_rope_head_dim"}

DEEPSEEK_V3 = Family(deepseek_v3, V3_NAMES, _DEEPSEEK_V3, _ROTATED, rotates_part=True)
# Its files have the size of whole heads, and the part of them that is rotated.
MISTRAL4 = Family(
    mistral4,
    replace(
        V3_NAMES,
        correction_bias=None,
        stacked=StackedNames("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    _MISTRAL4,
    rotates_part=True,
    rope_keys=("llama_4_scaling_beta", "max_position_embeddings"),
)

FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": Family(
        deepseek_v2,
        replace(V3_NAMES, correction_bias=None),
        _DEEPSEEK_V2,
        _ROTATED,
        rotates_part=True,
    ),
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Glm4MoeLiteForCausalLM": Family(
        glm4_moe_lite, V3_NAMES, _GLM4_MOE_LITE, _ROTATED, rotates_part=True
    ),
    "Mistral4ForCausalLM": MISTRAL4,
    "YoutuForCausalLM": Family(
        youtu, LLAMA, {"tie_word_embeddings": True}, _ROTATED, rotates_part=True
    ),
    "MiniCPM3ForCausalLM": Family(minicpm3, LLAMA, _MINICPM3, _ROTATED, rotates_part=True),
}
