"""What a decoder of the Llama family is, read from a Hugging Face `config.json`.

One frozen description covers Llama (and Yi, published as one), Mistral, Ministral, Qwen2/2.5 and
Qwen3: they differ only in biases, in q/k norms and in which layers see a sliding window. The file
is read as plain JSON, so nothing in a model folder is ever executed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.stage.models.rope import Rope, read_rope

JsonObject = dict[str, Any]


QUANT_METHODS = ("awq", "gptq")


class ModelError(ValueError):
    """A model folder that cannot be served; the message names the file and the cause."""


@dataclass(frozen=True, slots=True)
class Family:
    """What one architecture implies where its config.json is silent.

    biased_qkv: None follows `attention_bias`; True is Qwen2, whose config lacks the key.
    sliding: "never", "always" (every layer when `sliding_window` is set) or "layers"
        (`layer_types`, else the layers from `max_window_layers` on if `use_sliding_window`).
    defaults: keys that old checkpoints leave out.
    """

    biased_qkv: bool | None
    biased_out: bool
    qk_norm: bool
    sliding: str
    defaults: JsonObject


_LLAMA_DEFAULTS: JsonObject = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
_MISTRAL_DEFAULTS: JsonObject = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_QWEN_DEFAULTS: JsonObject = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(None, True, False, "never", _LLAMA_DEFAULTS),
    "MistralForCausalLM": Family(False, False, False, "always", _MISTRAL_DEFAULTS),
    "MinistralForCausalLM": Family(False, False, False, "layers", _MISTRAL_DEFAULTS),
    "Qwen2ForCausalLM": Family(True, False, False, "layers", _QWEN_DEFAULTS),
    "Qwen3ForCausalLM": Family(None, True, True, "layers", {**_QWEN_DEFAULTS, "head_dim": 128}),
}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and switches of one decoder; lengths in tokens, windows as in `AttentionShape`.

    sliding_windows: one entry per layer, None where a token sees all those before it.
    quantization_config: as found in config.json (GPTQ or AWQ), else None.
    """

    architecture: str
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Rope
    sliding_windows: tuple[int | None, ...]
    dtype: str
    eos_token_ids: tuple[int, ...]
    quantization_config: JsonObject | None = None

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the model's positions cover, in tokens."""
        return self.rope.reach


def load_config(folder: Path) -> DecoderConfig:
    """Read `config.json` (and `generation_config.json`'s end tokens) of a model folder.

    Raises ModelError for a missing or broken file, remote code, an unknown architecture or an
    option the family has no meaning for.
    """
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist")
    path = folder / "config.json"
    raw = _read_json(path)
    if "auto_map" in raw:
        raise ModelError(
            f"{path} asks for remote code (auto_map); Legato runs no code from a model folder"
        )
    try:
        return _describe(raw, path, _eos_token_ids(folder, raw))
    except KeyError as missing:
        raise ModelError(f"{path} lacks the key {missing}") from missing
    except (TypeError, ValueError) as bad:
        if isinstance(bad, ModelError):
            raise
        raise ModelError(f"{path}: {bad}") from bad


def _describe(raw: JsonObject, path: Path, eos_token_ids: tuple[int, ...]) -> DecoderConfig:
    names = raw.get("architectures") or ["(none named)"]
    family = FAMILIES.get(names[0])
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise ModelError(
            f"{path}: architecture {names[0]} is not supported; supported: {supported}"
        )
    config = {**family.defaults, **raw}
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method not in (None, *QUANT_METHODS):
        raise ModelError(
            f"{path}: quant_method {method!r} is not supported; "
            f"supported: {', '.join(QUANT_METHODS)}"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{path}: hidden_act {activation!r} is not supported; supported: silu")
    num_heads = _positive(config, "num_attention_heads")
    hidden_size = _positive(config, "hidden_size")
    num_layers = _positive(config, "num_hidden_layers")
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{path}: {num_heads} heads cannot share {num_kv_heads} key/value heads")
    head_dim = int(config.get("head_dim") or hidden_size // num_heads)
    attention_bias = bool(config.get("attention_bias", False))
    max_positions = _positive(config, "max_position_embeddings")
    return DecoderConfig(
        architecture=names[0],
        hidden_size=hidden_size,
        inner_size=_positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_positive(config, "vocab_size"),
        max_positions=max_positions,
        norm_eps=float(config["rms_norm_eps"]),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.biased_qkv is None else family.biased_qkv,
        out_bias=attention_bias and family.biased_out,
        mlp_bias=bool(config.get("mlp_bias", False)) and names[0] == "LlamaForCausalLM",
        qk_norm=family.qk_norm,
        rope=read_rope(config, head_dim, max_positions),
        sliding_windows=_sliding_windows(config, family, num_layers),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        eos_token_ids=eos_token_ids,
        quantization_config=config.get("quantization_config"),
    )


def _sliding_windows(config: JsonObject, family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if family.sliding == "never" or window is None:
        return (None,) * num_layers
    if family.sliding == "always":
        return (int(window),) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", 0))
        use = config.get("use_sliding_window", False)
        kinds = [
            "sliding_attention" if use and i >= first else "full_attention"
            for i in range(num_layers)
        ]
    elif "Qwen" in config["architectures"][0] and not config.get("use_sliding_window", False):
        return (None,) * num_layers
    if len(kinds) != num_layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ModelError(f"layer_types must name sliding_attention or full_attention {num_layers}x")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(folder: Path, config: JsonObject) -> tuple[int, ...]:
    """End tokens, generation_config.json first: chat models list their turn end only there."""
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)


def _positive(config: JsonObject, key: str) -> int:
    value = int(config[key])
    if value <= 0:
        raise ModelError(f"{key} must be positive, not {value}")
    return value


def _read_json(path: Path) -> JsonObject:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError) as bad:
        raise ModelError(f"{path} is not readable JSON: {bad}") from bad
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value
