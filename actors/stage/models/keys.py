"""A config.json that tracks which of its keys were read.

A key that a family does not read is refused, unless it is known to change nothing: by its name, or
because its value is neutral or the default of the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

JsonObject = dict[str, Any]

# Keys that change no logit of any model.
_HARMLESS = frozenset((
    # names and versions
    "_commit_hash", "_name_or_path", "architectures", "auto_map", "custom_pipelines", "id2label",
    "internal_version", "is_llama_config", "label2id", "language", "model_name", "model_type",
    "name_or_path", "num_labels", "problem_type", "task_specific_params", "tokenizer_class",
    "tokenizer_name", "transformers.js_config", "transformers_version", "unsloth_fixed",
    "unsloth_version",
    # training
    "embedding_initializer_range", "finetuning_task", "gradient_checkpointing", "init_config",
    "init_device", "init_std", "initializer_factor", "initializer_range", "input_jitter_noise",
    "layerdrop", "output_router_logits", "pretraining_tp", "router_aux_loss_coef",
    "router_jitter_noise", "router_z_loss_coef", "tf_legacy_loss", "use_bfloat16",
    # heads of classifiers
    "summary_activation", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    # how other implementations compute and what they return
    "_attn_implementation", "_attn_implementation_autoset", "attention_softmax_in_fp32",
    "attn_impl", "attn_implementation", "bias_dropout_fusion", "cache_implementation",
    "masked_softmax_fusion", "offset_alibi", "return_dict", "skip_bias_add", "skip_bias_add_qkv",
    "torchscript", "use_cache", "use_flash_attention", "use_flash_attn", "verbose",
    # lengths for tokenizers and trainers; positions have keys of their own
    "max_sequence_length", "model_max_length", "n_ctx",
    # leftovers of GPT's tokenizer, and of generation
    "is_decoder", "n_special", "predict_special_tokens", "prefix",
    # of layers with a window, which `use_sliding_window` turns on
    "max_window_layers",
))  # fmt: skip
_HARMLESS_ENDS = ("dropout", "pdrop", "_token_id", "_token_ids", "_token_index")
_NEUTRAL: tuple[Any, ...] = (None, False, 0, [], {}, "")
# The only neutral value of keys whose False, 0 or 1.0 says more than nothing.
_USUAL = {
    "attention_multiplier": None, "attention_scale": None, "causal": True,
    "do_layer_norm_before": True, "is_causal": True, "query_pre_attn_scalar": None,
    "scale_attn_weights": True, "softmax_scale": None,
}  # fmt: skip


def is_neutral(key: str, value: Any) -> bool:
    """Whether this value says that there is nothing: off, none, times 1.0."""
    if key in _USUAL:
        return bool(value == _USUAL[key])
    is_one = isinstance(value, float) and value == 1.0
    return is_one or any(value == neutral for neutral in _NEUTRAL)


class Keys:
    """Values by key. A key whose value is null counts as absent."""

    def __init__(
        self, raw: JsonObject, defaults: JsonObject, renamed: Mapping[str, str] | None = None
    ) -> None:
        """renamed: Llama's name of a key, used here -> the family's name. Where the family's is
        absent, Llama's counts, as in transformers."""
        self.values = {**defaults, **raw}
        self._renamed = renamed or {}
        self._read: set[str] = set()
        self._inner: dict[str, Keys] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """The key's value, or the default if it is absent."""
        names = dict.fromkeys((self._renamed.get(key, key), key))
        self._read.update(names)
        values = (self.values.get(name) for name in names)
        return next((value for value in values if value is not None), default)

    def size(self, key: str, default: int | None = None) -> int:
        """A number of at least 1. Raises KeyError if it is absent and has no default."""
        value = int(self.number(key, default))
        if value <= 0:
            raise ValueError(f"{self._renamed.get(key, key)} must be positive, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise KeyError(self._renamed.get(key, key))
        if not math.isfinite(value := float(value)):
            raise ValueError(f"{self._renamed.get(key, key)} must be a finite number, not {value}")
        return value

    def divisor(self, key: str, default: float | None = None) -> float:
        """A number above 0, by which others are divided."""
        value = self.number(key, default)
        if value <= 0:
            raise ValueError(f"{self._renamed.get(key, key)} must be positive, not {value}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, default))

    def inner(self, key: str) -> Keys:
        """The keys of an object within, which are to be read as well."""
        return self._inner.setdefault(key, Keys(self.get(key, {}), {}))

    def ignore(self, *keys: str) -> None:
        """Mark keys as read that the family's reference implementation does not read either."""
        self._read.update(keys)

    def only(self, key: str, *values: Any) -> None:
        """Raises ValueError if a key has another value than these. Absent, it has the first."""
        found = self.get(key, values[0])
        if found not in values:
            supported = ", ".join(map(repr, values))
            raise ValueError(f"{key} {found!r} is not supported; supported: {supported}")

    def unread(self) -> dict[str, Any]:
        """Keys that were not read and may change results, and their values; those of an object
        within as "key.inner"."""
        return dict(self._unread())

    def _unread(self) -> Iterator[tuple[str, Any]]:
        for key, value in self.values.items():
            is_known = key in self._read or key in _HARMLESS or key.endswith(_HARMLESS_ENDS)
            if not is_known and not is_neutral(key, value):
                yield key, value
        for key, keys in self._inner.items():
            yield from ((f"{key}.{name}", value) for name, value in keys.unread().items())


def known_to_transformers(architecture: str, unread: Mapping[str, Any]) -> set[str]:
    """Those keys that every model has in transformers, that only generation reads, or whose value
    is the architecture's default.

    Imports transformers, which takes seconds: call it for keys that would be refused.
    """
    from transformers import GenerationConfig, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    kind = kinds.get(architecture)
    defaults = CONFIG_MAPPING[kind]().to_dict() if kind else {}
    everywhere = {*PreTrainedConfig().to_dict(), *GenerationConfig().to_dict()}
    everywhere -= {"is_encoder_decoder"}
    known = set()
    for key, value in unread.items():
        outer, _, name = key.partition(".")
        here = defaults.get(outer) if name else defaults
        is_default = isinstance(here, dict) and here.get(name or outer) == value
        if is_default or outer in everywhere:
            known.add(key)
    return known
