"""GGUF files of Gemma 4."""

from __future__ import annotations

from actors.stage.models.config import ModelError
from actors.stage.models.family import FULL, SLIDING
from actors.stage.models.keys import JsonObject
from actors.stage.weights.gguf_family import GgufFamily
from actors.stage.weights.gguf_metadata import GgufMetadata

# Frequencies that are divided by as much as files have are none.
_NONE = 1e29


def _gemma4(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    pattern, layers = metadata.get("attention.sliding_window_pattern"), config["num_hidden_layers"]
    if not isinstance(pattern, list) or len(pattern) < layers or all(pattern[:layers]):
        raise ModelError(
            f"{metadata.file.path}: gemma4.attention.sliding_window_pattern {pattern} is not of "
            f"{layers} layers, some of them without a window"
        )
    kinds = [SLIDING if slides else FULL for slides in pattern[:layers]]
    full = kinds.index(FULL)
    heads = metadata.get("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads] * layers
    widths = metadata.get("feed_forward_length")
    inner = widths[0] if isinstance(widths, list) else widths
    dim, wide_dim = metadata.number("attention.key_length_swa"), config["head_dim"]
    metadata.get("attention.value_length_swa")
    per_layer = metadata.get("embedding_length_per_layer_input", 0)
    found: JsonObject = {
        "attention_k_eq_v": not metadata.has(f"blk.{full}.attn_v.weight"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "global_head_dim": wide_dim,
        "head_dim": dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": per_layer,
        "intermediate_size": inner,
        "layer_types": kinds,
        "num_global_key_value_heads": heads[full],
        "num_key_value_heads": heads[kinds.index(SLIDING)] if SLIDING in kinds else heads[0],
        "num_kv_shared_layers": metadata.get("attention.shared_kv_layers", 0),
        "rope_parameters": _ropes(metadata, config, dim),
        "sliding_window": metadata.number("attention.sliding_window"),
        "use_double_wide_mlp": isinstance(widths, list) and widths[layers - 1] == 2 * inner,
    }
    if per_layer:
        found["vocab_size_per_layer_input"] = config["vocab_size"]
    if number := metadata.get("expert_count", 0):
        found |= {
            "enable_moe_block": True,
            "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
            "num_experts": number,
            "top_k_experts": metadata.number("expert_used_count"),
        }
    return found


def _ropes(metadata: GgufMetadata, config: JsonObject, dim: int) -> JsonObject:
    """Of a layer without a window, the first features of each half are rotated."""
    factors = metadata.factors("rope_freqs.weight")
    rotated = sum(factor == 1.0 for factor in factors)
    if factors != [1.0] * rotated + factors[rotated:] or min([*factors[rotated:], _NONE]) < _NONE:
        raise ModelError(f"{metadata.file.path}: tensor rope_freqs.weight rotates other features")
    if metadata.get("rope.dimension_count_swa", dim) != dim:
        raise ModelError(
            f"{metadata.file.path}: gemma4.rope.dimension_count_swa is not the head's size"
        )
    return {
        SLIDING: {
            "rope_type": "default",
            "rope_theta": metadata.get("rope.freq_base_swa", 10_000.0),
        },
        FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": rotated / len(factors),
            "rope_theta": metadata.get("rope.freq_base", 1_000_000.0),
        },
    }


FAMILIES: dict[str, GgufFamily] = {
    "gemma4": GgufFamily("Gemma4ForCausalLM", "gemma4_text", _gemma4),
}
