"""Variants of `tests.tiny_models` for `actors.stage.models.families_vision`."""

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

# variant -> (model class, config entries over the base)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral3": (
        "Ministral3",
        {"head_dim": 16, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3}},
    ),
    "mistral3-images": ("Mistral3WithImages", {"head_dim": 16, "sliding_window": None}),
    "ministral3-images": (
        "Ministral3WithImages",
        {"head_dim": 16, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    ),
    "qwen2-vl-images": ("Qwen2VLWithImages", {"rope_parameters": _MROPE}),
    "qwen2.5-vl-images": ("Qwen2_5_VLWithImages", {"rope_parameters": _MROPE}),
    "qwen3-vl-images": (
        "Qwen3VLWithImages",
        {"head_dim": 16, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
    ),
}
CONFIGS = {
    "Mistral3WithImages": "MistralConfig",
    "Ministral3WithImages": "Ministral3Config",
    "Qwen2VLWithImages": "Qwen2VLTextConfig",
    "Qwen2_5_VLWithImages": "Qwen2_5_VLTextConfig",
    "Qwen3VLWithImages": "Qwen3VLTextConfig",
}
MODELS = {
    "Mistral3WithImages": "Mistral3ForConditionalGeneration",
    "Ministral3WithImages": "Mistral3ForConditionalGeneration",
    "Qwen2VLWithImages": "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLWithImages": "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLWithImages": "Qwen3VLForConditionalGeneration",
}
_MISTRAL3 = ("Mistral3Config", {"vision_config": _PIXTRAL, "tie_word_embeddings": False})
OUTER: dict[str, tuple[str, dict[str, Any]]] = {
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
