"""Gemma: norms around attention and MLP, soft caps, two kinds of layers."""

from __future__ import annotations

import math
from dataclasses import replace

from actors.stage.models.config import DecoderConfig
from actors.stage.models.family import FULL, SLIDING, Family, windows, windows_of_own_rotation
from actors.stage.models.keys import JsonObject, Keys
from actors.stage.models.names import Names, of_images


def gemma(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Llama with norms of weight 1 + w, a scaled embedding and tanh-approximated GELU, also if an
    old config says "gelu"."""
    keys.only("hidden_act", "gelu", "gelu_pytorch_tanh", "gelu_new")
    return _gemma(base, keys)


def _gemma(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    keys.ignore("hidden_activation")
    keys.only("use_bidirectional_attention", False)
    bias = keys.flag("attention_bias")
    return replace(
        base,
        qkv_bias=bias,
        out_bias=bias,
        activation="gelu_tanh",
        norm_offset=1.0,
        embedding_scale=math.sqrt(base.hidden_size),
        rounds_embedding_scale=True,
    )


def gemma2(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Gemma with norms after attention and MLP too, soft caps of scores and logits, and a window in
    every other layer."""
    keys.ignore("hidden_act")
    keys.ignore("_sliding_window_pattern")  # beside `layer_types`, which count
    pattern = keys.size("sliding_window_pattern")
    keys.only("sliding_window_size", keys.get("sliding_window"))  # the same, in converted models
    kinds = [SLIDING if (i + 1) % pattern else FULL for i in range(base.num_layers)]
    return replace(
        windows(_gemma(base, keys), keys, kinds),
        activation=base.activation,
        attention_scale=keys.divisor("query_pre_attn_scalar") ** -0.5,
        attention_softcap=keys.get("attn_logit_softcapping"),
        logit_softcap=keys.get("final_logit_softcapping"),
    )


def vault_gemma(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """VaultGemma: Gemma 2 without norms after attention and MLP."""
    return gemma2(base, keys)


def gemma3(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Gemma 2 with norms of each query and key head instead of soft caps. Window layers, five of
    six, have their own rotation, without scaling in published models."""
    keys.only("attn_logit_softcapping", None)
    config = windows_of_own_rotation(gemma2(base, keys), keys, "rope_local_base_freq")
    return replace(config, qk_norm="head")


def gemma3_images(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """The decoder of Gemma 3 with images (4 B and larger); images are refused, and their weights
    not read."""
    keys.only("final_logit_softcapping", None)
    return gemma3(base, keys)


_NAMES = Names(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_DEFAULTS: JsonObject = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA2 = {
    "max_position_embeddings": 8192,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = {
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_RENAMED = {"hidden_act": "hidden_activation"}
_IN_GEMMA3_WITH_IMAGES = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, Family] = {
    "GemmaForCausalLM": Family(
        gemma,
        defaults={
            "head_dim": 256,
            "hidden_act": "gelu",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma2ForCausalLM": Family(gemma2, _NAMES, {**_DEFAULTS, **_GEMMA2}, _RENAMED),
    "VaultGemmaForCausalLM": Family(
        vault_gemma,
        Names(mlp_norm="pre_feedforward_layernorm"),
        {**_DEFAULTS, **_GEMMA2},
        _RENAMED,
    ),
    "Gemma3ForCausalLM": Family(gemma3, _NAMES, {**_DEFAULTS, **_GEMMA3}, _RENAMED, True),
    "Gemma3ForConditionalGeneration": Family(
        gemma3_images,
        replace(_NAMES, stored_prefixes=of_images("vision_tower", "multi_modal_projector")),
        {**_DEFAULTS, **_GEMMA3, **_IN_GEMMA3_WITH_IMAGES},
        _RENAMED,
        True,
        inner="text_config",
    ),
}
