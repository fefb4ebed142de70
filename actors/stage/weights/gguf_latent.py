"""GGUF files of models with latent attention and mixtures of experts: DeepSeek-V2, V3 and kin."""

from __future__ import annotations

from actors.stage.models.config import ModelError
from actors.stage.models.keys import JsonObject
from actors.stage.weights.gguf_family import GgufFamily
from actors.stage.weights.gguf_metadata import GgufMetadata
from actors.stage.weights.gguf_mixtures import of_deepseek_v3

_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers of scores
_PER_MSCALE = 0.1  # the file has so much of `mscale_all_dim`


def _deepseek2(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """DeepSeek-V2, or V3 where a correction bias helps to choose experts, as in Kimi K2 and
    GLM-4.7-Flash."""
    if metadata.get("attention.key_length_mla") is None:
        raise ModelError(
            f"{metadata.file.path} is from before May 2025, when keys and values of latent "
            "attention became tensors of their own (deepseek2.attention.key_length_mla is missing)"
        )
    corrects = any(".exp_probs_b." in tensor for tensor in metadata.file.tensors)
    scores = metadata.get("expert_gating_func")
    if scores not in (None, _SIGMOID if corrects else _SOFTMAX):
        raise ModelError(
            f"{metadata.file.path}: deepseek2.expert_gating_func {scores} is not supported "
            f"{'with' if corrects else 'without'} a correction bias"
        )
    rope = {k: v for k, v in config["rope_parameters"].items() if k != "partial_rotary_factor"}
    if (log_factor := metadata.get("rope.scaling.yarn_log_multiplier")) is not None:
        mscale = round(log_factor / _PER_MSCALE, 6)
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    rotated = metadata.number("rope.dimension_count")
    del config["head_dim"]
    found = of_deepseek_v3(metadata, config, scores)
    del found["num_experts"]
    if not corrects:
        grouped = found["n_group"] > 1
        found |= {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "topk_method": "group_limited_greedy" if grouped else "greedy",
        }
    return {
        **found,
        "attention_bias": metadata.has("blk.0.attn_kv_a_mqa.bias"),
        "kv_lora_rank": metadata.number("attention.kv_lora_rank"),
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "qk_nope_head_dim": metadata.number("attention.key_length_mla") - rotated,
        "qk_rope_head_dim": rotated,
        "rope_parameters": rope,
        "v_head_dim": metadata.number("attention.value_length_mla"),
    }


FAMILIES: dict[str, GgufFamily] = {
    "deepseek2": GgufFamily("DeepseekV3ForCausalLM", "deepseek_v3", _deepseek2, latent=True),
}
