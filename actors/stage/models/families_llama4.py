"""The decoder of Llama 4: experts with a shared one, chunked windows, layers without positions."""

from __future__ import annotations

from dataclasses import replace

from actors.stage.models.config import DecoderConfig, Temperature
from actors.stage.models.family import FULL, Family
from actors.stage.models.keys import JsonObject, Keys
from actors.stage.models.names import Names, StackedNames
from actors.stage.models.rope import no_rope

CHUNKED = "chunked_attention"


def llama4(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Layers that are rotated see their chunk; the others see all, with a temperature that grows
    with the position. A norm of q and k without weights follows the rotation, which keeps it."""
    number = base.num_layers
    every = keys.size("no_rope_layer_interval", 4)
    rotates = keys.get("no_rope_layers") or [(i + 1) % every for i in range(number)]
    kinds = keys.get("layer_types") or [CHUNKED if has else FULL for has in rotates]
    if len(rotates) != number or len(kinds) != number or set(kinds) - {CHUNKED, FULL}:
        raise ValueError(f"no_rope_layers and layer_types ({CHUNKED}, {FULL}) need {number} values")
    chunk = keys.get("attention_chunk_size")
    every = keys.size("interleave_moe_layer_step", 1)
    mixtures = keys.get("moe_layers")
    if mixtures is None:
        mixtures = range(every - 1, number, every)
    slope, length = keys.number("attn_scale", 0.1), keys.size("floor_scale", 8192)
    temperature = Temperature(slope, length, first=1, rotated=False)
    has_norm = keys.flag("use_qk_norm", True)
    rope, nope = replace(base.ropes[0], interleaved=True), no_rope(base.max_positions)
    if has_norm:
        rope = replace(rope, attention_factor=1.0)  # the norm behind the rotation takes it away
    bias = keys.flag("attention_bias")
    keys.ignore("for_llm_compressor")
    return replace(
        base,
        qkv_bias=bias,
        out_bias=bias,
        inner_size=keys.size("intermediate_size_mlp"),
        expert_size=base.inner_size,
        ropes=tuple(rope if has else nope for has in rotates),
        sliding_windows=tuple(chunk if kind == CHUNKED else None for kind in kinds),
        chunked_windows=True,
        qk_norm="unit" if has_norm else "none",
        temperature=temperature if keys.flag("attn_temperature_tuning", True) else None,
        num_experts=keys.size("num_local_experts", 16),
        experts_per_token=keys.size("num_experts_per_tok", 1),
        scales_expert_inputs=True,
        expert_layers=tuple(layer in mixtures for layer in range(number)),
    )


def llama4_images(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """The decoder of Llama 4 with images; images are refused, and their weights not read."""
    return llama4(base, keys)


_NAMES = Names(
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert="feed_forward.experts.{}.",
    shared_expert="feed_forward.shared_expert.",
    stacked=StackedNames(
        "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", as_inputs=True
    ),
)
_WITH_IMAGES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_model.", None),
    ("multi_modal_projector.", None),
)
_DEFAULTS: JsonObject = {
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "vocab_size": 202_048,
}

FAMILIES: dict[str, Family] = {
    "Llama4ForCausalLM": Family(llama4, _NAMES, _DEFAULTS),
    "Llama4ForConditionalGeneration": Family(
        llama4_images,
        replace(_NAMES, stored_prefixes=_WITH_IMAGES),
        _DEFAULTS,
        inner="text_config",
    ),
}
