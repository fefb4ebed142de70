"""A config.json that tracks which of its keys were read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]

# Keys that affect the results of some decoder. A family refuses such a key if it does not read it,
# unless its value has no effect.
MEANINGFUL = frozenset(
    """
    activation activation_function alibi apply_residual_connection_post_layernorm attention_bias
    attention_chunk_size attention_multiplier attention_sinks attn_config attn_logit_softcapping
    bias clip_qkv
    decoder_sparse_step do_layer_norm_before embedding_multiplier enable_bias
    final_logit_softcapping first_k_dense_replace hidden_act hidden_activation kv_lora_rank
    layer_norm_elementwise_affine layer_types logit_scale logits_scaling mlp_bias
    moe_intermediate_size mup_enabled multi_query n_routed_experts n_shared_experts
    new_decoder_architecture no_rope_layers norm_topk_prob num_experts num_local_experts
    num_ln_in_parallel_attn parallel_attn partial_rotary_factor q_lora_rank qk_layernorm
    query_pre_attn_scalar residual_multiplier rope_local_base_freq rotary_pct scale_attn_weights
    scale_attn_by_inverse_layer_idx scale_depth scale_emb sliding_window sliding_window_pattern
    swiglu_alpha swiglu_limit use_bidirectional_attention use_mrope use_parallel_residual
    use_qk_norm vision_config word_embed_proj_dim
    """.split()  # noqa: SIM905 - one name a line would fill the file
)
_NEUTRAL: tuple[Any, ...] = (None, False, 0, [], {}, "")


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

    def get(self, key: str, default: Any = None) -> Any:
        """The key's value, or the default if it is absent."""
        for name in dict.fromkeys((self._renamed.get(key, key), key)):
            self._read.add(name)
            if (value := self.values.get(name)) is not None:
                return value
        return default

    def size(self, key: str, default: int | None = None) -> int:
        """A number of at least 1. Raises KeyError if it is absent and has no default."""
        value = self.get(key, default)
        if value is None:
            raise KeyError(self._renamed.get(key, key))
        if int(value) <= 0:
            raise ValueError(f"{key} must be positive, not {value}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise KeyError(self._renamed.get(key, key))
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, default))

    def ignore(self, *keys: str) -> None:
        """Mark keys as read that the family's reference implementation does not read either."""
        self._read.update(keys)

    def only(self, key: str, value: Any) -> None:
        """Raises ValueError if a key has another value than the supported one."""
        found = self.get(key, value)
        if found != value:
            raise ValueError(f"{key} {found!r} is not supported; supported: {value!r}")

    def unread(self) -> str | None:
        """An unread key that would change results, or None."""
        for key in sorted(MEANINGFUL - self._read):
            value = self.values.get(key)
            if not any(value == neutral for neutral in _NEUTRAL):
                return key
        return None
