"""GGUF files of models with latent attention: DeepSeek-V2, V3 and kin, Youtu, and MiniCPM3.

Of keys and values from the latents, files have a tensor each or, before May 2025 and of MiniCPM3,
one as folders do; then lengths of keys and values are those of a head, else of the latents.
"""

from __future__ import annotations

from actors.stage.models.config import ModelError
from actors.stage.models.keys import JsonObject
from actors.stage.weights.gguf_dense import long_rope
from actors.stage.weights.gguf_family import SIGMOID, SOFTMAX, GgufFamily, only
from actors.stage.weights.gguf_metadata import GgufMetadata
from actors.stage.weights.gguf_mixtures import of_deepseek_v3

_PER_MSCALE = 0.1  # the file has so much of `mscale_all_dim`


def _deepseek2(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """DeepSeek-V2, or V3 where a correction bias helps to choose experts, as in Kimi K2 and
    GLM-4.7-Flash; Youtu where there are no experts."""
    if not metadata.get("expert_count", 0):
        return _youtu(metadata, config)
    corrects = any(".exp_probs_b." in tensor for tensor in metadata.file.tensors)
    scores = metadata.get("expert_gating_func")
    if scores not in (None, SIGMOID if corrects else SOFTMAX):
        raise ModelError(
            f"{metadata.file.path}: deepseek2.expert_gating_func {scores} is not supported "
            f"{'with' if corrects else 'without'} a correction bias"
        )
    found = of_deepseek_v3(metadata, config, scores)
    del found["num_experts"]
    if not corrects:
        grouped = found["n_group"] > 1
        found |= {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "topk_method": "group_limited_greedy" if grouped else "greedy",
        }
    return found | _latent(metadata, config)


def _youtu(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """Of the experts that it does not have, its files have keys all the same."""
    for key in ("feed_forward_length", "shared_count", "weights_norm", "weights_scale"):
        metadata.get(f"expert_{key}")
    only(metadata, "leading_dense_block_count", config["num_hidden_layers"])
    named = {"architectures": ["YoutuForCausalLM"], "model_type": "youtu"}
    return named | _latent(metadata, config)


def _latent(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    rope = {k: v for k, v in config["rope_parameters"].items() if k != "partial_rotary_factor"}
    if (log_factor := metadata.get("rope.scaling.yarn_log_multiplier")) is not None:
        mscale = round(log_factor / _PER_MSCALE, 6)
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {
        "attention_bias": metadata.has("blk.0.attn_kv_a_mqa.bias"),
        **_sizes(metadata, config),
        "rope_parameters": rope,
    }


def _sizes(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    del config["head_dim"]
    rotated = metadata.number("rope.dimension_count")
    whole = metadata.get("attention.key_length_mla") or metadata.number("attention.key_length")
    values = metadata.get("attention.value_length_mla") or metadata.get("attention.value_length")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return {
        "kv_lora_rank": metadata.number("attention.kv_lora_rank"),
        "num_key_value_heads": heads,
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "qk_nope_head_dim": whole - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": values or hidden // heads,
    }


def _minicpm3(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """llama.cpp takes its multipliers for granted."""
    rope = {k: v for k, v in config["rope_parameters"].items() if k != "partial_rotary_factor"}
    if metadata.has("rope_factors_long.weight"):
        rope = long_rope(metadata, config)
    return {
        **_sizes(metadata, config),
        "dim_model_base": 256,
        "rope_parameters": rope,
        "scale_depth": 1.4,
        "scale_emb": 12,
    }


FAMILIES: dict[str, GgufFamily] = {
    "deepseek2": GgufFamily("DeepseekV3ForCausalLM", "deepseek_v3", _deepseek2, latent=True),
    "minicpm3": GgufFamily("MiniCPM3ForCausalLM", "minicpm3", _minicpm3, latent=True),
}
