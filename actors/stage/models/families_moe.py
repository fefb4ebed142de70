"""Mixtures of experts in some layers, by other scores than a softmax, or beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from actors.stage.models.config import DecoderConfig
from actors.stage.models.families_dense import hunyuan
from actors.stage.models.families_llama import NORMS_AFTER, QWEN, olmoe, qwen2, qwen3
from actors.stage.models.family import Family, experts, with_neighbors_rotated
from actors.stage.models.keys import Keys
from actors.stage.models.names import Names
from actors.stage.models.rope import read_rope
from kernels.layer_form import Routing


def qwen2_moe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Qwen2 with a mixture of experts in all layers, or every few, beside a shared expert of its
    own size, which is scaled by a sigmoid of the token. Qwen1.5-MoE is one."""
    bias = keys.flag("qkv_bias", True)
    config = replace(some_experts(qwen2(base, keys), keys, 60), qkv_bias=bias)
    return replace(config, shared_expert_size=keys.size("shared_expert_intermediate_size"))


def qwen3_moe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Qwen3 with a mixture of experts in all layers, or every few."""
    return some_experts(qwen3(base, keys), keys, 128)


def some_experts(base: DecoderConfig, keys: Keys, number: int) -> DecoderConfig:
    """So many experts, by default, in all layers or every few."""
    keys.only("use_sliding_window", False)
    every, plain = keys.size("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    number = keys.get("num_experts") or keys.size("num_local_experts", number)
    layers = [(i + 1) % every == 0 and i not in plain for i in range(base.num_layers)]
    return replace(
        experts(base, keys, number),
        expert_size=keys.size("moe_intermediate_size"),
        expert_layers=tuple(layers),
    )


def flex_olmo(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """OLMo-2 with a mixture of experts in every layer."""
    return olmoe(base, keys)


def hunyuan_moe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Hunyuan with a mixture of experts in every layer, beside a shared one of the same size."""
    for key in ("moe_topk", "moe_intermediate_size", "num_experts", "num_shared_expert"):
        if isinstance(value := keys.get(key), list):
            if len(set(value)) != 1:
                raise ValueError(f"{key}: layers that differ are not supported")
            keys.values[key] = value[0]
    keys.only("num_shared_expert", 1)
    keys.only("moe_intermediate_size", base.inner_size)
    keys.only("moe_layer_num_skipped", 0)
    keys.only("use_mixed_mlp_moe", True)
    keys.only("group_limited_greedy", False)
    keys.ignore("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token")
    return replace(
        experts(hunyuan(base, keys), keys, keys.size("num_experts")),
        expert_size=base.inner_size,
        shared_expert_size=base.inner_size,
        normalizes_expert_weights=True,
        wide_router=True,
    )


def minimax_m2(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """MiniMax-M2: norms of all of q and of all of k, half of each head rotated, and a mixture in
    every layer, whose experts are chosen by sigmoid scores with a correction bias."""
    if any(kind != 1 for kind in keys.get("attn_type_list", [])):
        raise ValueError("attn_type_list: only layers of kind 1, full attention, are supported")
    keys.only("use_qk_norm", True)
    keys.only("qk_norm_type", "per_layer")
    keys.only("scoring_func", "sigmoid")
    keys.only("use_routing_bias", True)
    keys.only("shared_intermediate_size", 0)
    keys.only("swa_rope_theta", -1.0)
    # Of models with other layers.
    keys.ignore("max_model_len", "mlp_intermediate_size", "shared_moe_mode", "use_grouped_topk")
    keys.ignore("mtp_transformer_layers", "num_mtp_modules", "use_mtp")
    config = experts(base, keys, keys.size("num_local_experts", 256))
    ropes = base.ropes
    if (rotated := keys.get("rotary_dim")) is not None:
        part = keys.get("partial_rotary_factor") or int(rotated) / base.head_dim
        given = {**keys.values, "partial_rotary_factor": part}
        rope = read_rope(given, base.head_dim, base.max_positions)
        ropes = (rope,) * base.num_layers
    return replace(
        config,
        ropes=ropes,
        qk_norm="whole",
        expert_size=base.inner_size,
        normalizes_expert_weights=True,
        routing=Routing("sigmoid"),
        wide_router=True,
    )


def ernie4_5_moe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """ERNIE 4.5: pairs of neighbors are rotated, and most layers have a mixture beside a shared
    expert; a correction bias helps to choose experts by their softmax."""
    keys.only("use_bias", False)
    keys.only("moe_use_aux_free", True)
    keys.ignore("moe_capacity", "moe_gate", "num_nextn_predict_layers")
    first, every = int(keys.number("moe_layer_start_index", 1)), keys.size("moe_layer_interval", 1)
    last = int(keys.number("moe_layer_end_index", -1))
    if last == -1:
        last = base.num_layers - 1
    width = keys.size("moe_intermediate_size")
    return replace(
        experts(base, keys, keys.size("moe_num_experts")),
        ropes=with_neighbors_rotated(base).ropes,
        expert_size=width,
        expert_layers=tuple(
            (layer + 1) % every == 0 and first <= layer <= last for layer in range(base.num_layers)
        ),
        normalizes_expert_weights=True,
        routing=Routing(least_sum=keys.number("moe_norm_min", 1e-12)),
        wide_router=True,
        shared_expert_size=width * int(keys.number("moe_num_shared_experts", 2)),
    )


FAMILIES: dict[str, Family] = {
    "Qwen2MoeForCausalLM": Family(
        qwen2_moe,
        Names(shared_expert="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate"),
        {
            **QWEN,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 16,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        qwen3_moe, defaults={**QWEN, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        hunyuan_moe,
        Names(
            q_norm="self_attn.query_layernorm",
            k_norm="self_attn.key_layernorm",
            router="mlp.gate.wg",
            shared_expert="mlp.shared_mlp.",
        ),
        {"max_position_embeddings": 2048, "moe_topk": 1, "rms_norm_eps": 1e-5},
        {"num_experts_per_tok": "moe_topk"},
        rope_keys=("alpha",),
    ),
    "FlexOlmoForCausalLM": Family(
        flex_olmo,
        NORMS_AFTER,
        {
            "max_position_embeddings": 4096,
            "num_experts": 7,
            "num_experts_per_tok": 5,
            "rope_theta": 500_000.0,
        },
    ),
    "MiniMaxM2ForCausalLM": Family(
        minimax_m2,
        Names(
            router="block_sparse_moe.gate",
            correction_bias="block_sparse_moe.e_score_correction_bias",
            expert="block_sparse_moe.experts.{}.",
            expert_gate="w1",
            expert_up="w3",
            expert_down="w2",
        ),
        {
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "rope_theta": 5_000_000.0,
        },
        rotates_part=True,
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        ernie4_5_moe,
        Names(
            shared_expert="mlp.shared_experts.",
            correction_bias="mlp.moe_statics.e_score_correction_bias",
            correction_bias_row=True,
            stored_prefixes=(("model.mtp_", None),),
        ),
        {
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
        {"num_experts_per_tok": "moe_k", "num_local_experts": "moe_num_experts"},
    ),
}
