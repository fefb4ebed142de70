"""Gemma 4: layers of two sizes, the last of which may share keys and values; inputs of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from actors.stage.models.config import DecoderConfig, LayerKind
from actors.stage.models.family import FULL, SLIDING, Family, windows
from actors.stage.models.keys import JsonObject, Keys
from actors.stage.models.names import Names, StackedNames, of_images
from actors.stage.models.rope import read_rope


def gemma4(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Gemma 3 with norms of the values too, scores without a scale, and a scalar of each layer;
    layers without a window have heads of another size and number. In the small models layers have
    inputs of their own, and the last have no keys and values; in the mixture, experts stand beside
    the MLP."""
    size = int(keys.number("hidden_size_per_layer_input"))
    if size:
        keys.only("vocab_size_per_layer_input", base.vocab_size)
    config = replace(_gemma4(base, keys), layer_input_size=size)
    if not keys.flag("enable_moe_block"):
        keys.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        return config
    kinds = [replace(k, names=replace(k.names, stacked=_STACKED)) for k in config.kinds]
    return replace(
        config,
        names=replace(config.names, stacked=_STACKED),
        kinds=tuple(kinds),
        num_experts=keys.size("num_experts"),
        experts_per_token=keys.size("top_k_experts"),
        expert_size=keys.size("moe_intermediate_size"),
        normalizes_expert_weights=True,
        expert_layers=(True,) * base.num_layers,
        experts_beside=True,
    )


def gemma4_images(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """The decoder of Gemma 4 with images and audio, which are refused, and whose weights are not
    read."""
    return gemma4(base, keys)


def gemma4_unified(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Gemma 4 (12B) without inputs of layers and experts."""
    return _gemma4(base, keys)


def gemma4_unified_images(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """The decoder of Gemma 4 (12B) with images and audio, which are refused, and whose weights are
    not read."""
    return gemma4_unified(base, keys)


def _gemma4(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    keys.ignore("vocab_size_per_layer_input")  # of a table that is not there
    keys.only("use_bidirectional_attention", None, "vision", False)  # "vision": of images alone
    bias = keys.flag("attention_bias")
    layer_types = _layer_types(base, keys)
    keys.values["layer_types"] = layer_types
    kinds = _kinds(base, keys, layer_types)
    full = next(kind for kind, which in zip(kinds, layer_types, strict=True) if which == FULL)
    given = keys.get("rope_parameters")
    dims = {SLIDING: base.head_dim, FULL: full.head_dim}
    ropes = {
        which: read_rope({"rope_parameters": given}, dims[which], base.max_positions, which)
        for which in set(layer_types)
        if given[which] is not None
    }
    return replace(
        windows(base, keys, layer_types),
        names=replace(base.names, stored_prefixes=_without_keys(base.names, kinds)),
        kinds=kinds,
        ropes=tuple(ropes[which] for which in layer_types),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        value_norm=True,
        wide_norms=True,
        attention_scale=1.0,
        embedding_scale=math.sqrt(base.hidden_size),
        rounds_embedding_scale=True,
        logit_softcap=keys.get("final_logit_softcapping"),
        layer_scalars=True,
    )


def _layer_types(base: DecoderConfig, keys: Keys) -> list[str]:
    """The last layer has no window, whatever the file says."""
    number = base.num_layers
    kinds = list(
        keys.get("layer_types") or [FULL if i % 6 == 5 else SLIDING for i in range(number)]
    )
    return [*kinds[:-1], FULL]


def _kinds(base: DecoderConfig, keys: Keys, layer_types: Sequence[str]) -> tuple[LayerKind, ...]:
    number, num_shared = base.num_layers, int(keys.number("num_kv_shared_layers", 0))
    first = number - num_shared
    if num_shared and {*layer_types[: max(0, first)]} != {*layer_types}:
        raise ValueError(
            f"num_kv_shared_layers {num_shared}: no layer before has keys and values for each kind"
        )
    one_tensor, wide = keys.flag("attention_k_eq_v"), keys.flag("use_double_wide_mlp")
    sizes = _sizes(base, keys, layer_types, one_tensor)
    kinds = []
    for layer, which in enumerate(layer_types):
        names = base.names
        source = layer
        if layer >= first:
            source = max(i for i in range(first) if layer_types[i] == which)
            names = replace(names, k=None)
        elif one_tensor and which == FULL:
            names = replace(names, v=str(names.k))
        head_dim, num_kv_heads = sizes[source]
        inner = base.inner_size * (2 if wide and source != layer else 1)
        kinds.append(
            LayerKind(
                head_dim=head_dim,
                num_kv_heads=num_kv_heads,
                inner_size=inner,
                names=names,
                kv_source=source,
            )
        )
    return tuple(kinds)


def _sizes(
    base: DecoderConfig, keys: Keys, layer_types: Sequence[str], one_tensor: bool
) -> list[tuple[int, int]]:
    """Size of a head and number of key/value heads of every layer: `per_layer_config` says them, in
    folders that transformers has saved, or the keys of all layers without a window."""
    number = int(keys.get("num_global_key_value_heads") or base.num_kv_heads)
    wide = (keys.size("global_head_dim"), number if one_tensor else base.num_kv_heads)
    usual = (base.head_dim, base.num_kv_heads)
    given: Mapping[str, Any] | None = keys.get("per_layer_config")
    if given is None:
        return [wide if which == FULL else usual for which in layer_types]
    sizes = [usual] * base.num_layers
    for layer, own in given.items():
        for name in {*own} - {"head_dim", "num_key_value_heads"}:
            raise ValueError(f"per_layer_config: {name} is not supported")
        sizes[int(layer)] = (
            int(own.get("head_dim", base.head_dim)),
            int(own.get("num_key_value_heads", base.num_kv_heads)),
        )
    return sizes


def _without_keys(names: Names, kinds: Sequence[LayerKind]) -> tuple[tuple[str, str | None], ...]:
    """Prefixes of stored names; tensors of keys and values that layers do not use are left out."""
    outer = ("model.", *(stored for stored, ours in names.stored_prefixes if ours == "model."))
    left_out = [
        (f"{prefix}layers.{layer}.self_attn.{which}", None)
        for layer, kind in enumerate(kinds)
        if kind.names.k is None
        for prefix in outer
        for which in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    ]
    return (*left_out, *names.stored_prefixes)


_STACKED = StackedNames("experts.gate_up_proj", "experts.down_proj")
_NAMES = Names(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    router="router.proj",
    expert="experts.{}.",
)
_WITH_IMAGES = replace(
    _NAMES,
    stored_prefixes=of_images(
        "vision_tower", "vision_embedder", "embed_vision", "audio_tower", "embed_audio"
    ),
)
_DEFAULTS: JsonObject = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "tie_word_embeddings": True,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
    },
}
_UNIFIED = {
    **{key: value for key, value in _DEFAULTS.items() if "per_layer_input" not in key},
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
}
_RENAMED = {"hidden_act": "hidden_activation"}

FAMILIES: dict[str, Family] = {
    "Gemma4ForCausalLM": Family(gemma4, _NAMES, _DEFAULTS, _RENAMED, True),
    "Gemma4ForConditionalGeneration": Family(
        gemma4_images, _WITH_IMAGES, _DEFAULTS, _RENAMED, True, inner="text_config"
    ),
    "Gemma4UnifiedForCausalLM": Family(gemma4_unified, _NAMES, _UNIFIED, _RENAMED, True),
    "Gemma4UnifiedForConditionalGeneration": Family(
        gemma4_unified_images, _WITH_IMAGES, _UNIFIED, _RENAMED, True, inner="text_config"
    ),
}
