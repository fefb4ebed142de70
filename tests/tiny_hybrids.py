"""Variants of `tiny_models` most of whose layers keep a state in place of keys and values."""

from __future__ import annotations

from typing import Any

_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
_MROPE: dict[str, Any] = {
    "rope_parameters": {
        **_DELTA["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_CONV: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True,
}

_MAMBA: dict[str, Any] = {
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
    "shared_intermediate_size": 48,
}
_NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": None,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
}
_FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 4,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
    "mamba_norm_before_gate": False,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "embedding_multiplier": 5.0,
    "key_multiplier": 0.6,
    "lm_head_multiplier": 0.8,
    "mlp_multipliers": [0.8, 0.6],
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.7, 1.3, 0.8, 0.9, 1.1],
    "ssm_out_multiplier": 0.7,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", {**_DELTA, **_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3-5": ("Qwen3_5", {**_DELTA, **_MROPE, "tie_word_embeddings": True}),
    "qwen3-5-images": ("Qwen3_5WithImages", {**_DELTA, **_MROPE}),
    "qwen3-5-moe": ("Qwen3_5Moe", {**_DELTA, **_EXPERTS, **_MROPE}),
    "qwen3-5-moe-images": ("Qwen3_5MoeWithImages", {**_DELTA, **_EXPERTS, **_MROPE}),
    "lfm2": ("Lfm2", _CONV),
    "lfm2-adjusted": (
        "Lfm2",
        {
            **_CONV, "block_auto_adjust_ff_dim": True, "block_multiple_of": 32, "conv_bias": True,
            "conv_L_cache": 4,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "granite-4": ("GraniteMoeHybrid", {**_GRANITE, **_MAMBA, "num_local_experts": 4}),
    "granite-4-dense": (
        "GraniteMoeHybrid",
        {
            **_GRANITE, **_MAMBA, "num_local_experts": 0, "num_experts_per_tok": 0,
            "mamba_n_groups": 2, "mamba_d_head": "auto", "mamba_conv_bias": False,
            "mamba_proj_bias": True, "mamba_d_conv": 3, "tie_word_embeddings": True,
            "position_embedding_type": "rope",
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {**_NEMOTRON, "hybrid_override_pattern": "M-MM*-*"},
    ),
    "nemotron-h-biased": (
        "NemotronH",
        {
            **_NEMOTRON, "hybrid_override_pattern": "M-*-M", "use_bias": True, "mlp_bias": True,
            "use_conv_bias": False, "conv_kernel": 3, "tie_word_embeddings": True,
        },
    ),
    "nemotron-3": (
        "NemotronH",
        {
            **_NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"],
            "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5,
        },
    ),
    "falcon-h1": ("FalconH1", {**_FALCON_H1, "mamba_rms_norm": False, "mamba_n_groups": 2}),
    "falcon-h1-normed": (
        "FalconH1",
        {
            **_FALCON_H1, "mamba_rms_norm": True, "mamba_d_ssm": None, "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": (
        "Bamba",
        {
            "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 12,
            "mamba_chunk_size": 8, "mamba_n_groups": 2,
        },
    ),
    "bamba-biased": (
        "Bamba",
        {
            "attn_layer_indices": [0], "mamba_n_heads": 4, "mamba_d_state": 12,
            "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True,
            "num_hidden_layers": 2,
        },
    ),
}  # fmt: skip
CONFIGS = {
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5WithImages": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
    "Qwen3_5MoeWithImages": "Qwen3_5MoeTextConfig",
}
MODELS = {
    "Qwen3_5WithImages": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeWithImages": "Qwen3_5MoeForConditionalGeneration",
}
_VISION: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2,
        "out_hidden_size": 64, "num_position_embeddings": 16,
    },
}  # fmt: skip
OUTER: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3_5WithImages": ("Qwen3_5Config", _VISION),
    "Qwen3_5MoeWithImages": ("Qwen3_5MoeConfig", _VISION),
}
