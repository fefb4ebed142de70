"""The shape of a model by the config.json of its folder: dense, with mixtures of experts, with
layers that keep states.

Keys have Llama's names. What another family calls otherwise is read where it is listed here; a
config that lacks a dimension under these names is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from app.paths import locate
from app.simulate.hardware.operators import read_operators
from app.simulate.hardware.shapes import Experts, ModelShape, StateLayers

_UNGATED = ("FalconForCausalLM", "Starcoder2ForCausalLM", "NemotronHForCausalLM")
_PARALLEL = ("CohereForCausalLM", "Cohere2ForCausalLM", "FalconForCausalLM")
_NEMOTRON_H, _FALCON_H1 = "NemotronHForCausalLM", "FalconH1ForCausalLM"
# Nemotron-H's layers have one part each.
_PARTS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_STATES = {"mamba", "linear_attention"}
# Families whose `sliding_window` holds in every layer; in others, `layer_types` has to say so.
_WINDOWED = ("MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM", "Starcoder2ForCausalLM")
_ATTENTION = {"attention", "full_attention", "sliding_attention"}
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_FIRST = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def is_model_config(path: Path) -> bool:
    """Whether a file describes a model, not the cost of its steps. Raises ValueError naming one
    that is no JSON."""
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return isinstance(content, dict) and "architectures" in content


def shape_at(name: str | Path) -> ModelShape | None:
    """That of the model in this folder, or of this config.json; None: it is neither. Raises as
    `read_shape`."""
    path = locate(name)
    if path.is_dir():
        return read_shape(path / "config.json")
    return read_shape(path) if is_model_config(path) else None


def read_shape(path: Path) -> ModelShape:
    """Named by the folder. Raises OSError, or ValueError naming the file and what it lacks."""
    try:
        return shape_of_config(json.loads(path.read_text("utf-8")), path.resolve().parent.name)
    except KeyError as missing:
        raise ValueError(f"{path} lacks the key {missing}") from missing
    except (ValueError, TypeError, AttributeError, ArithmeticError) as bad:  # of other kinds
        raise ValueError(f"{path}: {bad}") from bad


def shape_of_config(keys: Mapping[str, Any], name: str) -> ModelShape:
    """Raises KeyError for a missing key, ValueError for attention that has no timings.

    A window of some layers only is left out: it would lower the cost of attention.
    """
    if keys.get("kv_lora_rank"):
        raise ValueError("latent attention (kv_lora_rank) has no published timings")
    inner_keys = keys.get("text_config")
    if "hidden_size" not in keys and isinstance(inner_keys, Mapping):
        return shape_of_config({**inner_keys, "architectures": keys["architectures"]}, name)
    for key in ("global_head_dim", "per_layer_config"):  # Gemma 4's
        if keys.get(key):
            raise ValueError(f"layers whose heads differ in size ({key}) have no published timings")
    architecture = (keys.get("architectures") or [""])[0]
    if architecture == _NEMOTRON_H:
        keys = _of_nemotron_h(keys)
    hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
    num_layers = keys["num_hidden_layers"]
    inner = keys.get("intermediate_size") or keys.get("ffn_hidden_size")
    if inner is None and architecture == "FalconForCausalLM":
        inner = 4 * hidden
    if architecture == "Lfm2ForCausalLM":
        inner = _lfm2_inner(keys, inner)
    experts = _experts(keys, num_layers)
    if experts is None and architecture == "GraniteMoeHybridForCausalLM":
        inner = keys["shared_intermediate_size"]
    if inner is None:
        raise KeyError("intermediate_size")
    width = inner if experts is None else experts.per_token * experts.width + experts.shared
    return ModelShape(
        name,
        num_layers,
        hidden,
        inner,
        heads,
        keys.get("num_key_value_heads") or keys.get("num_kv_heads") or heads,
        keys.get("head_dim") or hidden // heads,
        keys["vocab_size"],
        _nearest(hidden, width),
        gated=architecture not in _UNGATED,
        all_reduces=1 if architecture in (*_PARALLEL, _NEMOTRON_H) else 2,
        window=_window(keys, architecture),
        max_model_len=keys["max_position_embeddings"],
        experts=experts,
        states=_states(keys, num_layers, architecture),
        gated_attention=bool(keys.get("linear_num_value_heads")),
        attending=_attending(keys, num_layers, architecture),
        mlps=_count(keys, {"mlp", "moe"}) if architecture == _NEMOTRON_H else None,
    )


def _of_nemotron_h(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Under Llama's names, with the defaults of `actors.stage.models.families_mamba`."""
    kinds = keys.get("layers_block_type") or keys.get("layer_types")
    if not kinds:
        kinds = [_PARTS[letter] for letter in keys["hybrid_override_pattern"]]
    num_experts = keys["n_routed_experts"] if "moe" in kinds else 0
    return {
        **keys,
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "head_dim": keys.get("attention_head_dim") or keys.get("head_dim") or 128,
        "n_routed_experts": num_experts,
        "num_experts_per_tok": keys["num_experts_per_tok"] if num_experts else 0,
        "shared_expert_intermediate_size": keys.get("moe_shared_expert_intermediate_size"),
        "mamba_n_heads": keys.get("mamba_num_heads", 128),
        "mamba_d_head": keys.get("mamba_head_dim", 64),
        "mamba_n_groups": keys.get("n_groups", 8),
        "mamba_d_state": keys.get("ssm_state_size", 128),
        "mamba_d_conv": keys.get("conv_kernel", 4),
    }


def _count(keys: Mapping[str, Any], kinds: Collection[str]) -> int:
    return sum(kind in kinds for kind in keys["layer_types"])


def _attending(keys: Mapping[str, Any], num_layers: int, architecture: str) -> int | None:
    """Where layers have attention and states side by side, or have neither; else None."""
    if architecture == _FALCON_H1:
        return num_layers
    return _count(keys, _ATTENTION) if architecture == _NEMOTRON_H else None


def _lfm2_inner(keys: Mapping[str, Any], inner: int | None) -> int | None:
    """As `lfm2` of `actors.stage.models.families_hybrid`: null is as good as absent."""
    inner = keys.get("block_ff_dim") or inner
    if inner is None or keys.get("block_auto_adjust_ff_dim") not in (None, True):
        return inner
    multiplier, multiple = keys.get("block_ffn_dim_multiplier"), keys.get("block_multiple_of")
    adjusted = int((1.0 if multiplier is None else multiplier) * (2 * inner // 3))
    multiple = 256 if multiple is None else multiple
    return -(-adjusted // multiple) * multiple


def _states(keys: Mapping[str, Any], num_layers: int, architecture: str) -> StateLayers | None:
    """Raises ValueError for layers that are divided otherwise."""
    if architecture != _FALCON_H1 and set(keys.get("layer_types") or [""]) <= _ATTENTION:
        return None
    for key in ("hybrid_override_pattern", "mamba_num_heads", "mamba_d_ssm"):
        if keys.get(key) and architecture not in (_NEMOTRON_H, _FALCON_H1):
            raise ValueError(f"no layers of attention or states and an MLP each ({key})")
    if "linear_num_value_heads" in keys:
        heads, key_heads = keys["linear_num_value_heads"], keys["linear_num_key_heads"]
        key_dim, value_dim = keys["linear_key_head_dim"], keys["linear_value_head_dim"]
        outputs = heads * value_dim
        channels = 2 * key_heads * key_dim + outputs
        inputs = channels + outputs + 2 * heads
        taps, matrices = keys["linear_conv_kernel_dim"], heads * key_dim * value_dim
    elif keys.get("mamba_n_heads"):
        heads, groups = keys["mamba_n_heads"], keys.get("mamba_n_groups", 1)
        head_dim = keys.get("mamba_d_head", "auto")
        if head_dim == "auto":
            width = keys.get("mamba_d_ssm") or keys.get("mamba_expand", 2) * keys["hidden_size"]
            head_dim = width // heads
        outputs = heads * head_dim
        channels = outputs + 2 * groups * keys["mamba_d_state"]
        inputs = channels + outputs + heads
        taps, matrices = keys.get("mamba_d_conv", 4), outputs * keys["mamba_d_state"]
    elif keys.get("conv_L_cache"):
        channels = outputs = keys["hidden_size"]
        inputs, taps, matrices = 3 * channels, keys["conv_L_cache"], 0
    else:
        return None
    num_attending = _num_attending(keys, num_layers, architecture)
    num_states = num_layers - num_attending
    if architecture == _NEMOTRON_H:
        num_states = _count(keys, _STATES)
    elif architecture == _FALCON_H1:
        num_states = num_layers
    if num_attending <= 0 or num_states <= 0:
        raise ValueError("no layers of both attention and states")
    state_bytes = 4 * matrices + 2 * (taps - 1) * channels
    return StateLayers(num_states, inputs, outputs, state_bytes)


def _num_attending(keys: Mapping[str, Any], num_layers: int, architecture: str) -> int:
    if (known := _attending(keys, num_layers, architecture)) is not None:
        return known
    if kinds := keys.get("layer_types"):
        return sum(kind in _ATTENTION for kind in kinds)
    for key in ("full_attn_idxs", "attn_layer_indices"):
        if key in keys:
            return len(keys[key])
    if keys.get("linear_num_value_heads"):
        return int(num_layers // keys.get("full_attention_interval", 4))
    raise KeyError("layer_types")


def _experts(keys: Mapping[str, Any], num_layers: int) -> Experts | None:
    number = next((keys[key] for key in _NUM_EXPERTS if keys.get(key)), 0)
    if not number:
        if keys.get("num_experts_per_tok") and not any(key in keys for key in _NUM_EXPERTS):
            raise KeyError(" or ".join(_NUM_EXPERTS))
        return None
    width = keys.get("moe_intermediate_size") or keys["intermediate_size"]
    shared = (
        keys.get("shared_expert_intermediate_size")
        or keys.get("shared_intermediate_size")
        or next((keys[key] for key in _NUM_SHARED if keys.get(key)), 0) * width
    )
    every = keys.get("decoder_sparse_step") or keys.get("moe_layer_interval") or 1
    plain = keys.get("mlp_only_layers") or ()
    first = next((keys[key] for key in _FIRST if keys.get(key)), 0)
    if "moe" in (kinds := keys.get("layer_types") or ()):  # of layers with one part each
        with_experts = [layer for layer, kind in enumerate(kinds) if kind == "moe"]
        return Experts(number, keys["num_experts_per_tok"], width, len(with_experts), shared)
    with_experts = [
        layer
        for layer in range(first, num_layers)
        if (layer + 1) % every == 0 and layer not in plain
    ]
    per_token = keys.get("moe_k") or keys["num_experts_per_tok"]
    return Experts(number, per_token, width, len(with_experts), shared)


def _window(keys: Mapping[str, Any], architecture: str) -> int:
    window, kinds = keys.get("sliding_window") or 0, keys.get("layer_types")
    everywhere = set(kinds) == {"sliding_attention"} if kinds else architecture in _WINDOWED
    return window if everywhere else 0


def _nearest(hidden: int, inner: int) -> str:
    """The profiled shape whose matrices are nearest in size."""

    def distance(name: str) -> tuple[float, float]:
        shape = profiled[name]["shape"]
        by_hidden, by_inner = shape["hidden"] / hidden, shape["intermediate"] / inner
        return abs(math.log(by_hidden)), abs(math.log(by_inner))

    profiled = read_operators("a100")["layers"]
    return min(profiled, key=distance)
