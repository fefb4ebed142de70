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
    "first_k_dense_replace": 1,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 80,
            "mlp_only_layers": [0],
        },
    ),
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
}
