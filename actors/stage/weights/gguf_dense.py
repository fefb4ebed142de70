"""GGUF architectures of dense decoders; Mixtral's is Llama's."""

from __future__ import annotations

from actors.stage.models.config import ModelError
from actors.stage.models.keys import JsonObject
from actors.stage.weights.gguf_family import (
    MLP_NORM,
    GgufFamily,
    of_images,
    only,
    partial_rotation,
    window,
)
from actors.stage.weights.gguf_metadata import GgufMetadata


def _llama(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    extra: JsonObject = {"mlp_bias": metadata.has("blk.0.ffn_gate.bias")}
    if metadata.get("expert_count", 0):
        extra |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": metadata.number("expert_count"),
            "num_experts_per_tok": metadata.number("expert_used_count"),
        }
    return extra | window(metadata)


def granite_keys(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """Granite's multipliers."""
    return {
        "embedding_multiplier": metadata.get("embedding_scale", 1.0),
        "residual_multiplier": metadata.get("residual_scale", 1.0),
        "attention_multiplier": metadata.get("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": metadata.get("logit_scale", 1.0),
    }


def attending_granite_keys(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """Granite 4 without Mamba is of the older architectures, with keys of what it lacks;
    `rope.scaling.finetuned` says whether anything is rotated."""
    only(metadata, "rope.scaling.finetuned", True)
    for key in ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank"):
        metadata.get(f"ssm.{key}")
    return granite_keys(metadata, config)


def _granite(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    shared = metadata.get("expert_shared_feed_forward_length")
    found = attending_granite_keys(metadata, config)
    found |= {"mlp_bias": metadata.has("blk.0.ffn_gate.bias")}
    return found | ({"intermediate_size": shared} if shared else {})


def long_rope(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """The rotation of a file that has factors of frequencies, for short texts and for long ones."""
    original = metadata.get("rope.scaling.original_context_length")
    return {
        "rope_type": "longrope",
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "short_factor": metadata.factors("rope_factors_short.weight"),
        "long_factor": metadata.factors("rope_factors_long.weight"),
        "original_max_position_embeddings": original or config["max_position_embeddings"],
        "attention_factor": metadata.get("rope.scaling.attn_factor"),
    }


def _phi3(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    extra: JsonObject = window(metadata)
    metadata.get("rope.scaling.original_context_length")  # of every file, scaled or not
    if metadata.has("rope_factors_long.weight"):
        extra["rope_parameters"] = long_rope(metadata, config) | partial_rotation(metadata, config)
    rope: JsonObject = extra.get("rope_parameters") or config["rope_parameters"]
    length = "original_max_position_embeddings"
    if length in rope:  # or the family's default would hold
        extra[length] = rope[length]
    return extra


def _gemma(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_scalar(metadata, config),
        **window(metadata),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def _gemma_scalar(metadata: GgufMetadata, config: JsonObject) -> float:
    """The square of what scores are divided by.

    Converters do not write it. llama.cpp takes the head dimension, except for the models of 27 B,
    which it knows by their layers, and which alone of Gemma 2 have heads of 128. Raises ModelError
    where the two disagree.
    """
    if (scale := metadata.get("attention.scale")) is not None:
        return float(scale**-2)
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    is_largest = layers == {"gemma2": 46, "gemma3": 62}[metadata.architecture]
    if metadata.architecture == "gemma2" and is_largest != (head_dim == 128):
        raise ModelError(
            f"{metadata.file.path} has {layers} layers with heads of {head_dim}, as no published "
            "model; gemma2.attention.scale is needed and missing"
        )
    return int(config["hidden_size"] // config["num_attention_heads"] if is_largest else head_dim)


def _gemma3(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    local = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", 10_000.0)}
    pattern = metadata.get("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, int):
        raise ModelError(
            f"{metadata.file.path}: gemma3.attention.sliding_window_pattern by layer is not "
            "supported; supported: a number"
        )
    found = _gemma2(metadata, config)
    if found["sliding_window"] is None:  # no layer has one
        del found["sliding_window"]
        pattern = 1
    return {
        **found,
        "sliding_window_pattern": pattern,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": local,
        },
    }


def _mistral3(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope = rope | {
            "mscale": 1.0,
            "mscale_all_dim": metadata.get("rope.scaling.yarn_log_multiplier", 0.0),
            "llama_4_scaling_beta": metadata.get("attention.temperature_scale", 0.0),
        }
    return window(metadata) | {"rope_parameters": rope}


def _ernie4_5(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {"use_bias": config.pop("attention_bias")}


def hunyuan(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """The file has the base that alpha has stretched, and says that nothing else is scaled."""
    metadata.get("rope.scaling.original_context_length")
    return {}


def _arcee(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {"mlp_bias": metadata.has("blk.0.ffn_up.bias")}


def windows_of_layers(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """By a pattern that a file has by layer, by its length, or not: then three of four."""
    found = window(metadata)
    pattern = metadata.get("attention.sliding_window_pattern")
    layers = config["num_hidden_layers"]
    if not isinstance(pattern, list):
        pattern = [bool((i + 1) % (pattern or 4)) for i in range(layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in pattern[:layers]]
    return found | ({"layer_types": kinds} if found["sliding_window"] else {})


def _olmo2(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """OLMo-2, or OLMo-3 where there are windows, whose rotation is not scaled."""
    found = windows_of_layers(metadata, config)
    if not found["sliding_window"]:
        return {}
    rope = config["rope_parameters"]
    theta = metadata.get("rope.freq_base_swa", rope["rope_theta"])
    local = {"rope_type": "default", "rope_theta": theta}
    return {
        **found,
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _seed_oss(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {
        "attention_out_bias": metadata.has("blk.0.attn_output.bias"),
        "mlp_bias": metadata.has("blk.0.ffn_gate.bias"),
    }


def _cohere(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    eps = config.pop("rms_norm_eps")
    return {"layer_norm_eps": eps, "logit_scale": metadata.number("logit_scale")}


def _cohere2(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return _cohere(metadata, config) | window(metadata)


FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", _llama, permuted=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3"),
    "gemma": GgufFamily("GemmaForCausalLM", "gemma", _gemma, norms_plus_one=True),
    "gemma2": GgufFamily("Gemma2ForCausalLM", "gemma2", _gemma2, norms_plus_one=True),
    "gemma3": GgufFamily("Gemma3ForCausalLM", "gemma3_text", _gemma3, norms_plus_one=True),
    "phi3": GgufFamily("Phi3ForCausalLM", "phi3", _phi3),
    "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2", _olmo2),
    "granite": GgufFamily("GraniteForCausalLM", "granite", _granite, permuted=True),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", "smollm3", permuted=True),
    "mistral3": GgufFamily("Ministral3ForCausalLM", "ministral3", _mistral3, permuted=True),
    "qwen2vl": GgufFamily("Qwen2ForCausalLM", "qwen2", of_images),
    "qwen3vl": GgufFamily("Qwen3ForCausalLM", "qwen3", of_images),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", "ernie4_5", _ernie4_5),
    "hunyuan-dense": GgufFamily("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", hunyuan),
    "arcee": GgufFamily("ArceeForCausalLM", "arcee", _arcee, permuted=True),
    "exaone4": GgufFamily("Exaone4ForCausalLM", "exaone4", windows_of_layers),
    "seed_oss": GgufFamily("SeedOssForCausalLM", "seed_oss", _seed_oss, renamed=MLP_NORM),
    "glm4": GgufFamily("Glm4ForCausalLM", "glm4"),
    "chatglm": GgufFamily("GlmForCausalLM", "glm"),
    "internlm2": GgufFamily("LlamaForCausalLM", "llama", permuted=True),
    "command-r": GgufFamily("CohereForCausalLM", "cohere", _cohere),
    "cohere2": GgufFamily("Cohere2ForCausalLM", "cohere2", _cohere2),
}
