"""Variants of `tiny_models` whose mixtures have other scores, groups or shared experts."""

from __future__ import annotations

from typing import Any

# 8 experts in 4 groups, of which 2 are kept.
_DEEPSEEK_V3: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}
# Mamba's sizes must fit, although no layer has any.
_ATTENTION = {"layer_types": ["full_attention"] * 3, "mamba_n_heads": 8}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [0],
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **_DEEPSEEK_V3,
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
        },
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**_DEEPSEEK_V3, **LATENT, "topk_method": "greedy", "n_shared_experts": 1},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_DEEPSEEK_V3,
            **LATENT,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
            },
        },
    ),
    "mistral4": (
        "Mistral4",
        {
            **_DEEPSEEK_V3,
            **LATENT,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "glm4-moe-lite": ("Glm4MoeLite", {**_DEEPSEEK_V3, **LATENT, "attention_bias": True}),
    "glm4-moe": (
        "Glm4Moe",
        {**_DEEPSEEK_V3, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    ),
    "glm4-moe-air": (
        "Glm4Moe",
        {
            **_DEEPSEEK_V3,
            "head_dim": 16,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_theta": 1e5, "partial_rotary_factor": 0.5},
        },
    ),
    "ernie4-5-moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_interval": 2,
            "moe_norm_min": 0.6,
            "tie_word_embeddings": True,
        },
    ),
    "solar-open": ("SolarOpen", {**_DEEPSEEK_V3, "head_dim": 16, "attention_bias": True}),
    "dots1": (
        "Dots1",
        {
            **_DEEPSEEK_V3,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "attention_bias": True,
            "sliding_window": 16,
            "max_window_layers": 2,
        },
    ),
    "exaone-moe": (
        "ExaoneMoe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "flex-olmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {**_GRANITE, "num_local_experts": 4, "shared_intermediate_size": 48},
    ),
    "granite-moe-hybrid": (
        "GraniteMoeHybrid",
        {**_GRANITE, **_ATTENTION, "num_local_experts": 4, "shared_intermediate_size": 48},
    ),
    "granite-4-nano": (
        "GraniteMoeHybrid",
        {
            **_GRANITE,
            **_ATTENTION,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1", {"head_dim": 16, "num_experts": 4, "moe_topk": 2}),
}
