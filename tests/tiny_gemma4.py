"""Variants of `tiny_models` of Gemma 4: sizes by layer, shared keys and values, layers' inputs."""

from __future__ import annotations

from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
_BOTH: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 16,
    "tie_word_embeddings": True,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 50_000.0},
    },
}
# As the larger models: one tensor of keys and values in layers without a window, which have fewer
# heads.
_LARGE: dict[str, Any] = {
    **_BOTH,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, FULL, FULL],
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 10.0,
}
_MIXTURE = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
# The last layer attends to the cache of the one before, in the same of two stages. transformers
# computes this without inputs of layers in the unified models alone.
_SHARED = {
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "hidden_activation": "silu",
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1_000.0},
        FULL: {"rope_type": "proportional", "rope_theta": 50_000.0, "factor": 2.0},
    },
}
_WITHOUT_INPUTS = {"hidden_size_per_layer_input": 0}
# As the small models: inputs of layers, and both kinds of layers share keys and values.
_SMALL: dict[str, Any] = {
    **_BOTH,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "num_key_value_heads": 1,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 263,
}
_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("Gemma4", {**_LARGE, **_WITHOUT_INPUTS, **_MIXTURE, "attention_bias": True}),
    "gemma4-inputs": ("Gemma4", _SMALL),
    "gemma4-inputs-images": ("Gemma4WithImages", {**_SMALL, "pad_token_id": 0}),
    "gemma4-unified": ("Gemma4Unified", {**_LARGE, **_SHARED}),
    "gemma4-unified-images": (
        "Gemma4UnifiedWithImages",
        {**_LARGE, **_SHARED, "pad_token_id": 0},
    ),
}
ONE_STAGE = ("gemma4-inputs", "gemma4-inputs-images")  # cannot be split into stages
CONFIGS = {
    "Gemma4": "Gemma4TextConfig",
    "Gemma4WithImages": "Gemma4TextConfig",
    "Gemma4Unified": "Gemma4UnifiedTextConfig",
    "Gemma4UnifiedWithImages": "Gemma4UnifiedTextConfig",
}
MODELS = {
    "Gemma4WithImages": "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedWithImages": "Gemma4UnifiedForConditionalGeneration",
}
OUTER: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma4WithImages": ("Gemma4Config", {"vision_config": _IMAGES}),
    "Gemma4UnifiedWithImages": (
        "Gemma4UnifiedConfig",
        {
            "vision_config": {
                "patch_size": 4,
                "mm_embed_dim": 16,
                "mm_posemb_size": 8,
                "output_proj_dims": 16,
            },
        },
    ),
}
