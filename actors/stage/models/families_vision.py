"""Decoders within models of images: images are refused, and their weights not read."""

from __future__ import annotations

from actors.stage.models import families_latent
from actors.stage.models.config import DecoderConfig
from actors.stage.models.families_llama import llama, mistral, qwen2, qwen3
from actors.stage.models.family import Family, with_growing_queries
from actors.stage.models.keys import JsonObject, Keys
from actors.stage.models.names import Names, of_images


def ministral3(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Ministral 3 and Devstral 2: Mistral with YaRN and queries that grow with the position."""
    keys.ignore("layer_types")  # the window, if any, is in every layer
    return with_growing_queries(mistral(base, keys), keys)


def mistral3_images(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """The decoder of Mistral Small 3.1, 3.2 and Magistral, Devstral Small 2, Ministral 3 or Mistral
    Small 4 with images; images are refused, and their weights not read."""
    return base


def kimi_images(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """The decoder of Kimi K2.5; images are refused, and their weights not read."""
    return base


def qwen2_images(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """The decoder of Qwen2-VL or Qwen2.5-VL; images are refused, and their weights not read."""
    keys.ignore("vision_config")  # beside the decoder's keys in published files
    return qwen2(base, keys)


def qwen3_images(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """The decoder of Qwen3-VL; images are refused, and their weights not read."""
    keys.only("use_sliding_window", False)
    return qwen3(base, keys)


def internvl_images(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """The decoder of InternVL 3 and 3.5 in transformers' format (Qwen2.5, Qwen3 or Llama); images
    are refused, and their weights not read."""
    return base


def llava_images(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """The decoder of LLaVA 1.5 and Pixtral in transformers' format (Llama, Mistral or Qwen2);
    images are refused, and their weights not read."""
    keys.ignore("is_composition")  # that the whole file has parts
    return base


# Of a decoder's part that lacks them, as transformers wrote it until 2025.
_SIZES: JsonObject = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
_MISTRAL: JsonObject = {
    **_SIZES,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_QWEN: JsonObject = {
    **_SIZES,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "vocab_size": 151_936,
}
_TIED: JsonObject = {"tie_word_embeddings": True}  # unless a head is stored
_MINISTRAL3: JsonObject = {
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_MINISTRAL3_ROPE = ("llama_4_scaling_beta", "max_position_embeddings")
_QWEN2: JsonObject = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": 4096,
    "vocab_size": 152_064,
}
_QWEN3: JsonObject = {
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "max_position_embeddings": 128_000,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rope_theta": 500_000.0,
    "vocab_size": 151_936,
}
_TOWER = Names(stored_prefixes=of_images("vision_tower", "multi_modal_projector"))
_QWEN_IMAGES = Family(
    qwen2_images,
    Names(stored_prefixes=of_images("visual")),
    _QWEN2,
    rope_keys=("mrope_section",),
    inner="text_config",
    may_be_flat=True,
)
_KIMI = Family(
    kimi_images,
    Names(stored_prefixes=of_images("vision_tower", "mm_projector")),
    inner="text_config",
    kinds=dict.fromkeys(("deepseek_v3", "kimi_k2"), families_latent.DEEPSEEK_V3),
)

FAMILIES: dict[str, Family] = {
    "Ministral3ForCausalLM": Family(ministral3, defaults=_MINISTRAL3, rope_keys=_MINISTRAL3_ROPE),
    "Mistral3ForConditionalGeneration": Family(
        mistral3_images,
        _TOWER,
        inner="text_config",
        kinds={
            "mistral": Family(mistral, defaults={**_MISTRAL, **_TIED}),
            "ministral3": Family(
                ministral3, defaults={**_MINISTRAL3, **_TIED}, rope_keys=_MINISTRAL3_ROPE
            ),
            "mistral4": families_latent.MISTRAL4,
        },
    ),
    "Kimi_K25ForConditionalGeneration": _KIMI,
    "KimiK25ForConditionalGeneration": _KIMI,  # in published files
    "Qwen2VLForConditionalGeneration": _QWEN_IMAGES,
    "Qwen2_5_VLForConditionalGeneration": _QWEN_IMAGES,
    "Qwen3VLForConditionalGeneration": Family(
        qwen3_images,
        Names(stored_prefixes=of_images("visual")),
        _QWEN3,
        rope_keys=("mrope_section", "mrope_interleaved"),
        inner="text_config",
    ),
    "InternVLForConditionalGeneration": Family(
        internvl_images,
        _TOWER,
        inner="text_config",
        kinds={
            "qwen2": Family(qwen2, defaults={**_QWEN, **_TIED}),
            "qwen3": Family(qwen3, defaults={**_QWEN, **_TIED, "head_dim": 128}),
            "llama": Family(llama, defaults={**_SIZES, **_TIED}),
        },
    ),
    "LlavaForConditionalGeneration": Family(
        llava_images,
        _TOWER,
        inner="text_config",
        kinds={
            "llama": Family(llama, defaults=_SIZES),
            "mistral": Family(mistral, defaults=_MISTRAL),
            "qwen2": Family(qwen2, defaults=_QWEN),
        },
    ),
}
