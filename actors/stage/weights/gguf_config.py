"""Converts a GGUF file's metadata to the config.json of the same model as a folder.

An unknown key of the model's own namespace is refused, because it may change results, unless its
value is neutral.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from actors.stage.models.config import ModelError
from actors.stage.models.keys import JsonObject
from actors.stage.weights.gguf_file import GgufFile
from actors.stage.weights.gguf_metadata import GgufMetadata

# Turn ends, for files of chat models that name only the end of text.
_TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>",
)  # fmt: skip
_CONTROL = 3  # token type


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How a GGUF architecture maps to one of folders.

    extra: keys beyond the shared ones. permuted: rows of q and k are stored in pairs of
    neighbors, not in halves as in a folder. norms_plus_one: norms are stored as 1 + w.
    """

    architecture: str
    model_type: str
    extra: Callable[[GgufMetadata, JsonObject], JsonObject] = field(
        default=lambda metadata, config: {}
    )
    permuted: bool = False
    norms_plus_one: bool = False


def _llama(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    extra: JsonObject = {"mlp_bias": metadata.has("blk.0.ffn_gate.bias")}
    if metadata.get("expert_count", 0):
        extra |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": metadata.number("expert_count"),
            "num_experts_per_tok": metadata.number("expert_used_count"),
        }
    return extra | _window(metadata)


def _window(metadata: GgufMetadata) -> JsonObject:
    return {"sliding_window": metadata.get("attention.sliding_window") or None}


def _granite(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {
        "mlp_bias": metadata.has("blk.0.ffn_gate.bias"),
        "embedding_multiplier": metadata.get("embedding_scale", 1.0),
        "residual_multiplier": metadata.get("residual_scale", 1.0),
        "attention_multiplier": metadata.get("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": metadata.get("logit_scale", 1.0),
    }


def _qwen3_moe(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _phi3(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    extra: JsonObject = _window(metadata)
    original = metadata.get("rope.scaling.original_context_length")  # of every file, scaled or not
    if metadata.has("rope_factors_long.weight"):
        extra["rope_parameters"] = {
            "rope_type": "longrope",
            "rope_theta": config["rope_parameters"]["rope_theta"],
            "short_factor": metadata.factors("rope_factors_short.weight"),
            "long_factor": metadata.factors("rope_factors_long.weight"),
            "original_max_position_embeddings": original or config["max_position_embeddings"],
            "attention_factor": metadata.get("rope.scaling.attn_factor"),
        }
        extra["rope_parameters"] |= _partial(metadata, config)
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
        "sliding_window": metadata.number("attention.sliding_window"),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def _gemma_scalar(metadata: GgufMetadata, config: JsonObject) -> float:
    """The square of what scores are divided by.

    Converters do not write it. llama.cpp takes the head dimension, except for the models of 27 B,
    which it knows by their layers, and which alone have heads of 128. Raises ModelError where the
    two disagree.
    """
    if (scale := metadata.get("attention.scale")) is not None:
        return float(scale**-2)
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    is_largest = layers == {"gemma2": 46, "gemma3": 62}[metadata.architecture]
    if is_largest != (head_dim == 128):
        raise ModelError(
            f"{metadata.file.path} has {layers} layers with heads of {head_dim}, as no published "
            f"model; {metadata.architecture}.attention.scale is needed and missing"
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
    return {
        **_gemma2(metadata, config),
        "sliding_window_pattern": pattern,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": local,
        },
    }


def _of_images(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """The decoder of a model of images: for a text, its rotation is a plain one."""
    metadata.get("rope.dimension_sections")
    metadata.get("n_deepstack_layers")
    return {}


def _mistral3(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope = rope | {
            "mscale": 1.0,
            "mscale_all_dim": metadata.get("rope.scaling.yarn_log_multiplier", 0.0),
            "llama_4_scaling_beta": metadata.get("attention.temperature_scale", 0.0),
        }
    return _window(metadata) | {"rope_parameters": rope}


def _ernie4_5(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {"use_bias": config.pop("attention_bias")}


def _hunyuan(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """The file has the base that alpha has stretched, and says that nothing else is scaled."""
    metadata.get("rope.scaling.original_context_length")
    return {}


def _arcee(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {"mlp_bias": metadata.has("blk.0.ffn_up.bias")}


GGUF_FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", _llama, permuted=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe),
    "gemma": GgufFamily("GemmaForCausalLM", "gemma", _gemma, norms_plus_one=True),
    "gemma2": GgufFamily("Gemma2ForCausalLM", "gemma2", _gemma2, norms_plus_one=True),
    "gemma3": GgufFamily("Gemma3ForCausalLM", "gemma3_text", _gemma3, norms_plus_one=True),
    "phi3": GgufFamily("Phi3ForCausalLM", "phi3", _phi3),
    "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2"),
    "granite": GgufFamily("GraniteForCausalLM", "granite", _granite, permuted=True),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", "smollm3", permuted=True),
    "mistral3": GgufFamily("Ministral3ForCausalLM", "ministral3", _mistral3, permuted=True),
    "qwen2vl": GgufFamily("Qwen2ForCausalLM", "qwen2", _of_images),
    "qwen3vl": GgufFamily("Qwen3ForCausalLM", "qwen3", _of_images),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", "ernie4_5", _ernie4_5),
    "hunyuan-dense": GgufFamily("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _hunyuan),
    "arcee": GgufFamily("ArceeForCausalLM", "arcee", _arcee, permuted=True),
}


def family_of(file: GgufFile) -> GgufFamily:
    """The file's family. Raises ModelError if the format does not support its architecture."""
    name = file.metadata.get("general.architecture")
    family = GGUF_FAMILIES.get(str(name))
    if family is None:
        raise ModelError(
            f"{file.path}: architecture {name!r} is not supported in a GGUF file; supported: "
            f"{', '.join(GGUF_FAMILIES)}"
        )
    return family


def config_of(file: GgufFile) -> JsonObject:
    """The whole config.json. Raises ModelError naming the file and a missing or unknown key."""
    family, metadata = family_of(file), GgufMetadata(file)
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} holds no tensor token_embd.weight")
    heads, hidden = metadata.number("attention.head_count"), metadata.number("embedding_length")
    config: JsonObject = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_hidden_layers": metadata.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": metadata.get("attention.key_length") or hidden // heads,
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "tie_word_embeddings": not metadata.has("output.weight"),
        "dtype": _dtype(file),
        "quantization_config": {"quant_method": "gguf", "types": _types(file)},
        "eos_token_id": _end_tokens(file),
    }
    if metadata.get("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise ModelError(f"{file.path}: values of another length than keys are not supported")
    if metadata.get("pooling_type", 0) not in (0, 1, 3):  # of embeddings; a request chooses its own
        raise ModelError(
            f"{file.path}: {metadata.architecture}.pooling_type is neither none, mean nor last"
        )
    metadata.get("vocab_size")  # taken from the embedding instead
    metadata.get("tensor_data_layout")  # in old files: how the converter read its input
    config["rope_parameters"] = _rope(metadata, config)
    config |= family.extra(metadata, config)
    if (key := metadata.unread()) is not None:
        raise ModelError(
            f"{file.path}: key {key} ({str(file.metadata[key])[:80]}) is not known to "
            f"{family.architecture}"
        )
    return config


def _rope(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    theta = metadata.get("rope.freq_base", 10_000.0)
    rope: JsonObject = {"rope_type": "default", "rope_theta": theta, **_partial(metadata, config)}
    metadata.get("rope.scaling.finetuned")
    kind = metadata.get("rope.scaling.type", "none")
    if metadata.has("rope_freqs.weight"):  # Llama 3's scaling, precomputed
        factors = metadata.factors("rope_freqs.weight")
        return rope | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": config["max_position_embeddings"],
            "attention_factor": 1.0,
        }
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    elif kind not in ("none", "longrope"):  # longrope: the family reads its tensors
        raise ModelError(f"{metadata.file.path}: rope.scaling.type {kind!r} is not supported")
    if kind == "yarn":
        original = metadata.get("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = original or config["max_position_embeddings"]
        rope["attention_factor"] = metadata.get("rope.scaling.attn_factor")
        rope["beta_fast"] = metadata.get("rope.scaling.yarn_beta_fast")
        rope["beta_slow"] = metadata.get("rope.scaling.yarn_beta_slow")
    return {key: value for key, value in rope.items() if value is not None}


def _partial(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    rotated = metadata.get("rope.dimension_count") or config["head_dim"]
    if rotated == config["head_dim"]:
        return {}
    return {"partial_rotary_factor": rotated / config["head_dim"]}


def _types(file: GgufFile) -> str:
    """Storage types of the matrices, most frequent first."""
    counts: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            counts[tensor.kind.name] = counts.get(tensor.kind.name, 0) + 1
    return " ".join(sorted(counts, key=lambda name: -counts[name]))


def _dtype(file: GgufFile) -> str:
    """The dtype of most matrices; bfloat16 if they are quantized."""
    first = _types(file).split()[0]
    return {"F32": "float32", "F16": "float16"}.get(first, "bfloat16")


def _end_tokens(file: GgufFile) -> list[int]:
    """The file's end tokens, and known turn ends that the vocabulary has as control tokens."""
    named = (file.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom"))
    ends = [int(token) for token in named if token is not None]
    tokens, kinds = (file.metadata.get(f"tokenizer.ggml.{k}", []) for k in ("tokens", "token_type"))
    for token, (text, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind == _CONTROL and text in _TURN_ENDS and token not in ends:
            ends.append(token)
    return ends
