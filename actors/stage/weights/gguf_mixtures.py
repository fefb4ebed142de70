"""GGUF architectures of mixtures of experts."""

from __future__ import annotations

from actors.stage.models.config import ModelError
from actors.stage.models.keys import JsonObject
from actors.stage.weights.gguf_dense import attending_granite_keys, hunyuan, windows_of_layers
from actors.stage.weights.gguf_family import MLP_NORM, SIGMOID, GgufFamily, of_images, only, window
from actors.stage.weights.gguf_metadata import GgufMetadata

_LLAMA4_CHUNK, _LLAMA4_EVERY = 8192, 4  # what llama.cpp takes for all files of Llama 4
_WITHOUT_NORMS = 128  # experts of the Llama 4 that has no norms of q and k


def experts(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    width = metadata.get("expert_feed_forward_length")
    return {
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": config.get("intermediate_size") if width is None else width,
    }


def _qwen2_moe(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {
        **experts(metadata, config),
        "norm_topk_prob": False,
        "qkv_bias": metadata.has("blk.0.attn_q.bias"),
        "shared_expert_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
    }


def qwen3_moe(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return experts(metadata, config) | {"norm_topk_prob": True}


def _qwen3_moe_images(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return qwen3_moe(metadata, config) | of_images(metadata, config)


def _olmoe(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    found = experts(metadata, config) | {"norm_topk_prob": False}
    return found | {"intermediate_size": found.pop("moe_intermediate_size")}


def _granite_moe(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    found = {
        **attending_granite_keys(metadata, config),
        "num_local_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
    }
    if shared := metadata.get("expert_shared_feed_forward_length", 0):
        return {
            **found,
            "architectures": ["GraniteMoeSharedForCausalLM"],
            "model_type": "granitemoeshared",
            "shared_intermediate_size": shared,
        }
    return found


def _gpt_oss(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {
        **window(metadata),
        "num_local_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "intermediate_size": metadata.number("expert_feed_forward_length"),
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }


def of_deepseek_v3(
    metadata: GgufMetadata, config: JsonObject, scores: int | None = SIGMOID
) -> JsonObject:
    """Keys of families whose mixtures are those of DeepSeek-V3, but for the scores."""
    only(metadata, "expert_gating_func", scores)
    return {
        **experts(metadata, config),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0),
        "n_group": metadata.get("expert_group_count", 1),
        "n_routed_experts": metadata.number("expert_count"),
        "n_shared_experts": metadata.get("expert_shared_count", 1),
        "norm_topk_prob": metadata.get("expert_weights_norm", False),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 1.0),
        "topk_group": metadata.get("expert_group_used_count", 1),
    }


def _glm4_moe(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    found = of_deepseek_v3(metadata, config) | of_images(metadata, config)
    return found | {"use_qk_norm": metadata.has("blk.0.attn_q_norm.weight")}


def _minimax_m2(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    only(metadata, "expert_gating_func", SIGMOID)
    return {
        "num_local_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "intermediate_size": metadata.number("expert_feed_forward_length"),
    }


def _dots1(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    metadata.get("expert_shared_feed_forward_length")  # of all shared experts, beside their number
    found = of_deepseek_v3(metadata, config)
    return found | {"max_window_layers": config["num_hidden_layers"]}  # none has one


def _ernie4_5_moe(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    width = metadata.number("expert_feed_forward_length")
    shared = metadata.get("expert_shared_feed_forward_length", 0)
    if shared % width:
        raise ModelError(
            f"{metadata.file.path}: ernie4_5-moe.expert_shared_feed_forward_length {shared} is not "
            f"of whole experts of {width}"
        )
    metadata.get("expert_shared_count")  # beside their whole length, which counts
    return {
        "moe_intermediate_size": width,
        "moe_k": metadata.number("expert_used_count"),
        "moe_layer_interval": metadata.number("interleave_moe_layer_step"),
        "moe_layer_start_index": metadata.get("leading_dense_block_count", 0),
        "moe_num_experts": metadata.number("expert_count"),
        "moe_num_shared_experts": shared // width,
        "use_bias": config.pop("attention_bias"),
    }


def _hunyuan_moe(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    width = config["intermediate_size"]
    only(metadata, "expert_feed_forward_length", width)
    only(metadata, "expert_shared_feed_forward_length", width)
    only(metadata, "expert_shared_count", 1)
    return {
        **hunyuan(metadata, config),
        "moe_topk": metadata.number("expert_used_count"),
        "num_experts": metadata.number("expert_count"),
    }


def _exaone_moe(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    metadata.get("expert_shared_feed_forward_length")  # of all shared experts, beside their number
    found = of_deepseek_v3(metadata, config) | windows_of_layers(metadata, config)
    return {
        **found,
        "num_experts": found.pop("n_routed_experts"),
        "num_shared_experts": found.pop("n_shared_experts"),
    }


def _llama4(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """llama.cpp takes most of it for granted."""
    only(metadata, "attention.sliding_window", _LLAMA4_CHUNK)
    only(metadata, "attention.sliding_window_pattern", _LLAMA4_EVERY)
    only(metadata, "expert_gating_func", SIGMOID)
    number = metadata.number("expert_count")
    width = metadata.number("expert_feed_forward_length")
    return {
        "attention_chunk_size": _LLAMA4_CHUNK,
        "attn_scale": 0.1,
        "floor_scale": _LLAMA4_CHUNK,
        "interleave_moe_layer_step": metadata.number("interleave_moe_layer_step"),
        "intermediate_size": width,
        "intermediate_size_mlp": config.pop("intermediate_size", width),
        "no_rope_layer_interval": _LLAMA4_EVERY,
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "num_local_experts": number,
        "use_qk_norm": number != _WITHOUT_NORMS,
    }


FAMILIES: dict[str, GgufFamily] = {
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe),
    "qwen3vlmoe": GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe_images),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2_moe),
    "gpt-oss": GgufFamily("GptOssForCausalLM", "gpt_oss", _gpt_oss, renamed=MLP_NORM),
    "glm4moe": GgufFamily("Glm4MoeForCausalLM", "glm4_moe", _glm4_moe, renamed=MLP_NORM),
    "minimax-m2": GgufFamily("MiniMaxM2ForCausalLM", "minimax_m2", _minimax_m2),
    "olmoe": GgufFamily("OlmoeForCausalLM", "olmoe", _olmoe),
    "dots1": GgufFamily("Dots1ForCausalLM", "dots1", _dots1),
    "ernie4_5-moe": GgufFamily("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _ernie4_5_moe),
    "hunyuan-moe": GgufFamily("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", _hunyuan_moe),
    "exaone-moe": GgufFamily("ExaoneMoeForCausalLM", "exaone_moe", _exaone_moe),
    "llama4": GgufFamily("Llama4ForCausalLM", "llama4_text", _llama4),
    "granitemoe": GgufFamily("GraniteMoeForCausalLM", "granitemoe", _granite_moe, permuted=True),
}
