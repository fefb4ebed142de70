"""Reads the `DecoderConfig` from a model folder's config.json."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from actors.stage.models import (
    families_alibi,
    families_deepseek,
    families_dense,
    families_gemma,
    families_gemma4,
    families_gpt,
    families_granite,
    families_hybrid,
    families_latent,
    families_llama,
    families_llama4,
    families_mamba,
    families_moe,
    families_neox,
    families_vision,
)
from actors.stage.models.config import DecoderConfig, ModelError, read_json
from actors.stage.models.family import FULL, Family
from actors.stage.models.keys import JsonObject, Keys, known_to_transformers
from actors.stage.models.rope import read_rope, unread_parameters

_log = logging.getLogger(__name__)

FAMILIES: dict[str, Family] = {  # by the architecture's name
    **families_llama.FAMILIES,
    **families_llama4.FAMILIES,
    **families_granite.FAMILIES,
    **families_moe.FAMILIES,
    **families_dense.FAMILIES,
    **families_deepseek.FAMILIES,
    **families_gemma.FAMILIES,
    **families_gemma4.FAMILIES,
    **families_gpt.FAMILIES,
    **families_neox.FAMILIES,
    **families_alibi.FAMILIES,
    **families_latent.FAMILIES,
    **families_vision.FAMILIES,
    **families_hybrid.FAMILIES,
    **families_mamba.FAMILIES,
}

IGNORED = "model.ignore_config_keys"  # the setting

QUANT_METHODS = ("awq", "compressed-tensors", "fp8", "gguf", "gptq")

_OF_WHOLE_MODEL = (
    "compression_config", "dtype", "torch_dtype", "eos_token_id", "quantization_config",
)  # fmt: skip
_TIED = "tie_word_embeddings"  # of the whole model, or in older files of its decoder

# Activations by their name in config.json -> their name in `Backend.activate`.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def load_config(
    folder: Path, ignored_keys: Collection[str] = (), *, refuse_unknown: bool = True
) -> DecoderConfig:
    """Read `config.json` (and `generation_config.json`'s end tokens) of a model folder.

    ignored_keys: not to be refused although they are unknown. refuse_unknown: False leaves that
    check out, which may import transformers. Raises ModelError for a missing or
    broken file, an unknown architecture, a key that the family does not read and that may change
    results, or an ignored key that is no such one. Code in the folder (`auto_map`) is never run;
    the implementation here replaces it.
    """
    if not folder.is_dir():
        if folder.exists():
            raise ModelError(f"{folder} is neither a folder nor a GGUF file")
        raise ModelError(f"model folder {folder} does not exist")
    path = folder / "config.json"
    raw = read_json(path)
    name = (raw.get("architectures") or ["(none named)"])[0]
    family = FAMILIES.get(name)
    if family is None:
        code = " and its code (auto_map) is not run" if "auto_map" in raw else ""
        raise ModelError(
            f"{path}: architecture {name} is not supported{code}; supported: {', '.join(FAMILIES)}"
        )
    if "auto_map" in raw:
        _log.info("%s names code of its own (auto_map), which is not run", path)
    try:
        if family.inner:
            raw = _inner(raw, family)
            family = family.of_kind(raw.get("model_type"))
        keys = Keys(raw, family.defaults, family.renamed)
        config = family.describe(_shared(name, family, keys, _eos_token_ids(folder, raw)), keys)
        _check(config, keys, family)
        if (config.quantization_config or {}).get("quant_method") == "gguf":
            # Files have every layer as (out, in) features.
            config = replace(config, names=replace(config.names, transposed=False))
        if refuse_unknown:
            _refuse(_unknown(config, keys, family), ignored_keys, name)
    except KeyError as missing:
        raise ModelError(f"{path} lacks the key {missing}") from missing
    except (TypeError, ValueError, ArithmeticError) as bad:
        raise ModelError(f"{path}: {bad}") from bad
    return config


def _inner(raw: JsonObject, family: Family) -> JsonObject:
    """The decoder's part of a config, with what the whole model's says of it."""
    inner = raw.get(family.inner)
    if inner is None and family.may_be_flat:
        return raw
    if not isinstance(inner, dict):
        raise KeyError(family.inner)
    whole = {k: raw[k] for k in _OF_WHOLE_MODEL if raw.get(k) is not None}
    tied = bool(inner.get(_TIED) or raw.get(_TIED))  # a head that is stored counts nevertheless
    return {**inner, **whole, **({_TIED: tied} if _TIED in inner or _TIED in raw else {})}


def _shared(name: str, family: Family, keys: Keys, eos_token_ids: tuple[int, ...]) -> DecoderConfig:
    """The part of the description that all families read alike."""
    num_heads, hidden_size = keys.size("num_attention_heads"), keys.size("hidden_size")
    num_layers = keys.size("num_hidden_layers")
    head_dim = keys.size("head_dim", hidden_size // num_heads)
    max_positions = keys.size("max_position_embeddings")
    activation = keys.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: {known}")
    # Read by `read_rope`.
    keys.ignore("original_max_position_embeddings", "partial_rotary_factor")
    keys.ignore("rope_parameters", "rope_scaling", "rope_theta")
    torch_dtype = keys.get("torch_dtype")  # of older folders, as is the next
    compression = keys.get("compression_config")
    stored = keys.get("quantization_config")
    layer_type = FULL if family.ropes_by_layer_type else None
    rope = read_rope(keys.values, head_dim, max_positions, layer_type)
    return DecoderConfig(
        architecture=name,
        names=family.names,
        hidden_size=hidden_size,
        inner_size=int(keys.get("intermediate_size", 0)),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=keys.size("vocab_size"),
        max_positions=max_positions,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[activation],
        ropes=(rope,) * num_layers,
        sliding_windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        tied_embeddings=keys.flag(_TIED),
        dtype=str(keys.get("dtype") or torch_dtype or "float32"),
        eos_token_ids=eos_token_ids,
        quantization_config=stored or compression or None,
        quantization_key="quantization_config"
        if stored or not compression
        else "compression_config",
    )


def _check(config: DecoderConfig, keys: Keys, family: Family) -> None:
    if config.inner_size <= 0:
        keys.size("intermediate_size")  # raises if it is absent
    for layer, rope in enumerate(config.ropes):
        own = config.at(layer)
        if own.num_heads % own.num_kv_heads:
            raise ValueError(
                f"{own.num_heads} heads cannot share {own.num_kv_heads} key/value heads"
            )
        if rope.dim not in (0, own.head_dim) and not family.rotates_part:
            raise ValueError(
                f"partial_rotary_factor, by which {rope.dim} of {own.head_dim} features are "
                f"rotated, is not supported for {config.architecture}"
            )
    stored = config.quantization_config
    if stored is None:
        return
    if not isinstance(stored, dict) or stored.get("quant_method") is None:
        raise ValueError(f"{config.quantization_key} lacks the key 'quant_method'")
    method = stored["quant_method"]
    stacked = config.names.stacked
    known = QUANT_METHODS if stacked is None else stacked.quant_methods
    if method == "gguf":  # files have an expert's tensors apart
        return
    if not known:
        raise ValueError(
            f"quant_method {method!r}: quantized folders of {config.architecture} are not "
            "supported; float ones are, and model.quantization rounds them at load"
        )
    if method not in known:
        raise ValueError(f"quant_method {method!r} is not supported; supported: {', '.join(known)}")


def _unknown(config: DecoderConfig, keys: Keys, family: Family) -> JsonObject:
    """Keys that nothing here reads and that may change results, and their values."""
    unread = {**keys.unread(), **unread_parameters(keys.values, family.rope_keys)}
    known = known_to_transformers(config.architecture, unread) if unread else ()
    return {key: value for key, value in unread.items() if key not in known}


def _refuse(unknown: JsonObject, ignored: Collection[str], architecture: str) -> None:
    for key in ignored:
        if key not in unknown:
            raise ValueError(
                f"{IGNORED}: {key} would not be refused; refused: {', '.join(unknown) or 'none'}"
            )
    for key, value in unknown.items():
        if key not in ignored:
            raise ValueError(
                f"{key} {str(value)[:80]} may change what a model computes, and {architecture} is "
                f"not known to have it; if it changes nothing, add it to {IGNORED}"
            )


def _eos_token_ids(folder: Path, config: JsonObject) -> tuple[int, ...]:
    """End tokens, generation_config.json first, because chat models list turn ends only there. A
    null or an empty list there says nothing, as if the key were absent."""
    path = folder / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.is_file() else None
    if ids is None or ids == []:
        path = folder / "config.json"
        ids = config.get("eos_token_id")
    if ids is None:
        return ()
    try:
        return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)
    except (TypeError, ValueError) as bad:
        raise ModelError(f"{path}: eos_token_id {ids!r}: {bad}") from bad
