"""Variants of `tests.tiny_models` for `actors.stage.models.families_dense`, `.._vision`."""

from __future__ import annotations

from typing import Any

_YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 14,
    "out_hidden_size": 64,
}  # fmt: skip
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14,
}  # fmt: skip

_SLIDING, _FULL = "sliding_attention", "full_attention"

# variant -> (model class, config entries over the base)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 16,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "attention_bias": True,
            "rope_parameters": {
                _FULL: {**_YARN, "attention_factor": 1.3},
                _SLIDING: {"rope_type": "default", "rope_theta": 5_000.0},
            },
        },
    ),
    "exaone4": (
        "Exaone4",
        {"sliding_window": 16, "layer_types": [_SLIDING, _FULL, _SLIDING]},
    ),
    "exaone4-unlimited": ("Exaone4", {"sliding_window": None, "layer_types": [_FULL] * 3}),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "seed-oss-biased": (
        "SeedOss",
        {"head_dim": 24, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "ernie4.5": ("Ernie4_5", {"head_dim": 24, "tie_word_embeddings": True}),
    "ernie4.5-biased": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "helium": ("Helium", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10_000.0,
                "alpha": 1000.0,
                "factor": 1.0,
            },
        },
    ),
    "hunyuan-biased": ("HunYuanDenseV1", {"head_dim": 16, "attention_bias": True}),
    "arcee": ("Arcee", {}),
    "arcee-biased": ("Arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": None}),
    "gpt-neox-serial": (
        "GPTNeoX",
        {
            "num_key_value_heads": None,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rotary_pct": 0.5,
            "rotary_emb_base": 5_000,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_fast",
        },
    ),
    "gptj": ("GPTJ", {"num_key_value_heads": None, "rotary_dim": 8}),
    "gpt-bigcode": ("GPTBigCode", {"num_key_value_heads": None, "tie_word_embeddings": True}),
    "gpt-bigcode-all-heads": (
        "GPTBigCode",
        {"num_key_value_heads": None, "multi_query": False, "n_inner": 80},
    ),
    "phi": ("Phi", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm-parallel": (
        "StableLm",
        {"use_parallel_residual": True, "partial_rotary_factor": 0.5},
    ),
    "nemotron": ("Nemotron", {}),
    "nemotron-biased": (
        "Nemotron",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "olmo": ("Olmo", {"attention_bias": True}),
    "vault-gemma": (
        "VaultGemma",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "tie_word_embeddings": True,
        },
    ),
    "ministral3": (
        "Ministral3",
        {"head_dim": 16, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3}},
    ),
    "mistral3-images": ("Mistral3WithImages", {"head_dim": 16, "sliding_window": None}),
    "ministral3-images": (
        "Ministral3WithImages",
        {"head_dim": 16, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    ),
    "internvl-images": ("InternVLWithImages", {"attention_dropout": 0.0}),
    "llava-images": ("LlavaWithImages", {"rms_norm_eps": 1e-5}),
    "qwen2-vl-images": ("Qwen2VLWithImages", {"rope_parameters": _MROPE}),
    "qwen2.5-vl-images": ("Qwen2_5_VLWithImages", {"rope_parameters": _MROPE}),
    "qwen3-vl-images": (
        "Qwen3VLWithImages",
        {"head_dim": 16, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
    ),
}
CONFIGS = {
    "InternVLWithImages": "Qwen2Config",
    "LlavaWithImages": "LlamaConfig",
    "Mistral3WithImages": "MistralConfig",
    "Ministral3WithImages": "Ministral3Config",
    "Qwen2VLWithImages": "Qwen2VLTextConfig",
    "Qwen2_5_VLWithImages": "Qwen2_5_VLTextConfig",
    "Qwen3VLWithImages": "Qwen3VLTextConfig",
}
MODELS = {
    "InternVLWithImages": "InternVLForConditionalGeneration",
    "LlavaWithImages": "LlavaForConditionalGeneration",
    "Mistral3WithImages": "Mistral3ForConditionalGeneration",
    "Ministral3WithImages": "Mistral3ForConditionalGeneration",
    "Qwen2VLWithImages": "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLWithImages": "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLWithImages": "Qwen3VLForConditionalGeneration",
}
_MISTRAL3 = ("Mistral3Config", {"vision_config": _PIXTRAL, "tie_word_embeddings": False})
OUTER: dict[str, tuple[str, dict[str, Any]]] = {
    "InternVLWithImages": (
        "InternVLConfig",
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": [28, 28],
                "patch_size": [14, 14],
            },
            "tie_word_embeddings": False,
        },
    ),
    "LlavaWithImages": ("LlavaConfig", {"vision_config": _PIXTRAL}),
    "Mistral3WithImages": _MISTRAL3,
    "Ministral3WithImages": _MISTRAL3,
    "Qwen2VLWithImages": (
        "Qwen2VLConfig",
        {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2}},
    ),
    "Qwen2_5_VLWithImages": (
        "Qwen2_5_VLConfig",
        {"vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [0]}},
    ),
    "Qwen3VLWithImages": (
        "Qwen3VLConfig",
        {"vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}},
    ),
}
