"""Converts a GGUF file's metadata to the config.json of the same model as a folder.

An unknown key of the model's own namespace is refused, because it may change results, unless its
value is neutral.
"""

from __future__ import annotations

from actors.stage.models.config import ModelError
from actors.stage.models.keys import JsonObject
from actors.stage.weights.gguf_families import family_of
from actors.stage.weights.gguf_family import partial_rotation
from actors.stage.weights.gguf_file import GgufFile
from actors.stage.weights.gguf_metadata import GgufMetadata

# Turn ends, for files of chat models that name only the end of text.
_TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>",
    "<|return|>", "<|call|>", "<turn|>", "<|tool_response>", "[EOT]",
)  # fmt: skip
_OF_A_MESSAGE = "<|end|>"  # where turns of several messages end otherwise, as gpt-oss's do
_CONTROL, _USER_DEFINED = 3, 4  # token types


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
        "intermediate_size": _most(metadata, "feed_forward_length"),
        "num_hidden_layers": metadata.number("block_count")
        - metadata.get("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": _most(metadata, "attention.head_count_kv") or heads,
        "head_dim": metadata.get("attention.key_length") or hidden // heads,
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": _epsilon(metadata),
        "attention_bias": any(metadata.has(f"blk.0.attn_{q}.bias") for q in ("q", "qkv")),
        "tie_word_embeddings": not metadata.has("output.weight"),
        "dtype": _dtype(file),
        "quantization_config": {"quant_method": "gguf", "types": _types(file)},
        "eos_token_id": _end_tokens(file),
    }
    if not config["intermediate_size"]:  # every MLP is a mixture of experts
        del config["intermediate_size"]
    length = metadata.get("attention.value_length", config["head_dim"])
    if length != config["head_dim"] and not family.latent:
        raise ModelError(f"{file.path}: values of another length than keys are not supported")
    if metadata.get("pooling_type", 0) not in (0, 1, 3):  # of embeddings; a request chooses its own
        raise ModelError(
            f"{file.path}: {metadata.architecture}.pooling_type is neither none, mean nor last"
        )
    metadata.get("vocab_size")  # taken from the embedding instead
    metadata.get("tensor_data_layout")  # in old files: how the converter read its input
    config["rope_parameters"] = _rope(metadata, config)
    config |= family.extra(metadata, config)
    _check_long_rope(metadata, config)
    if (key := metadata.unread()) is not None:
        raise ModelError(
            f"{file.path}: key {key} ({str(file.metadata[key])[:80]}) is not known to "
            f"{family.architecture}"
        )
    return config


def _most(metadata: GgufMetadata, key: str) -> int:
    """Of the layers; families where they differ read each one's."""
    value = metadata.get(key, 0)
    return int(max(value) if isinstance(value, list) else metadata.number(key) if value else 0)


def _epsilon(metadata: GgufMetadata) -> float:
    """Of whichever norms the family has; a file with both keys is clear only where they agree."""
    of_layer_norms = metadata.get("attention.layer_norm_epsilon")
    if of_layer_norms is None:
        return float(metadata.number("attention.layer_norm_rms_epsilon"))
    if metadata.get("attention.layer_norm_rms_epsilon", of_layer_norms) != of_layer_norms:
        raise ModelError(
            f"{metadata.file.path}: attention.layer_norm_epsilon and "
            "attention.layer_norm_rms_epsilon differ"
        )
    return float(of_layer_norms)


def _rope(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    theta = metadata.get("rope.freq_base", 10_000.0)
    rope: JsonObject = {"rope_type": "default", "rope_theta": theta}
    rope |= partial_rotation(metadata, config)
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
        # Converters write a folder's factor under one name or the other; 1 says nothing.
        named = [f"rope.scaling.{key}attn_factor" for key in ("yarn_", "")]
        factors = [factor for key in named if (factor := metadata.get(key, 1.0)) != 1.0]
        rope["attention_factor"] = factors[0] if factors else None
        rope["beta_fast"] = metadata.get("rope.scaling.yarn_beta_fast")
        rope["beta_slow"] = metadata.get("rope.scaling.yarn_beta_slow")
    return {key: value for key, value in rope.items() if value is not None}


def _check_long_rope(metadata: GgufMetadata, config: JsonObject) -> None:
    """Not all families read its tensors. Raises ModelError where they would be left out."""
    named = metadata.get("rope.scaling.type") == "longrope"
    if not named and not metadata.has("rope_factors_long.weight"):
        return
    if config.get("rope_parameters", {}).get("rope_type") != "longrope":
        raise ModelError(
            f"{metadata.file.path}: the factors of rope.scaling.type 'longrope' are not read for "
            f"{metadata.architecture}"
        )


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
    """The file's end tokens, and known turn ends that the vocabulary has as tokens of their own."""
    named = (file.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom"))
    ends = [int(token) for token in named if token is not None]
    tokens, kinds = (file.metadata.get(f"tokenizer.ggml.{k}", []) for k in ("tokens", "token_type"))
    found = {
        text: token
        for token, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and text in _TURN_ENDS
    }
    if "<|return|>" in found:
        found.pop(_OF_A_MESSAGE, None)
    return [*ends, *(token for token in found.values() if token not in ends)]
