"""GGUF architectures of decoders with layer norms, most of them without a gate."""

from __future__ import annotations

from actors.stage.models.config import ModelError
from actors.stage.models.keys import JsonObject
from actors.stage.weights.gguf_family import GgufFamily, window
from actors.stage.weights.gguf_metadata import GgufMetadata


def _starcoder2(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {
        **window(metadata),
        "norm_epsilon": config.pop("rms_norm_eps"),
        "use_bias": config.pop("attention_bias"),
    }


def _phi(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """Biases are everywhere."""
    del config["attention_bias"]
    return {"layer_norm_eps": config.pop("rms_norm_eps")}


def _stablelm(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    metadata.get("use_parallel_residual")  # true also in files of models that have none
    return {
        "layer_norm_eps": config.pop("rms_norm_eps"),
        "use_parallel_residual": not metadata.has("blk.0.ffn_norm.weight"),
        "use_qkv_bias": config.pop("attention_bias"),
    }


def _nemotron(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {
        "mlp_bias": metadata.has("blk.0.ffn_up.bias"),
        "norm_eps": config.pop("rms_norm_eps"),
    }


def _olmo(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    del config["rms_norm_eps"]  # always the same
    return {}


def _gpt_neox(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    return {
        "attention_bias": metadata.has("blk.0.attn_qkv.bias"),
        "layer_norm_eps": config.pop("rms_norm_eps"),
        "use_parallel_residual": metadata.get("use_parallel_residual", True),
    }


def _falcon(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """One key and value for all heads is 7B's, another number that of newer models."""
    del config["attention_bias"]
    newer = config["num_key_value_heads"] > 1
    return {
        "bias": metadata.has("blk.0.attn_qkv.bias"),
        "ffn_hidden_size": config.pop("intermediate_size"),
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "new_decoder_architecture": newer,
        "num_kv_heads": config.pop("num_key_value_heads"),
        **({"num_ln_in_parallel_attn": _falcon_norms(metadata)} if newer else {}),
    }


def _falcon_norms(metadata: GgufMetadata) -> int:
    return 2 if metadata.has("blk.0.attn_norm_2.weight") else 1


def _gpt2(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """GPT-2, and StarCoder and SantaCoder, all of whose heads share one key and value."""
    del config["attention_bias"]
    del config["rope_parameters"]
    return {
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "n_inner": config.pop("intermediate_size"),
    }


def _starcoder(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    if config.pop("num_key_value_heads") != 1:
        raise ModelError(f"{metadata.file.path}: starcoder.attention.head_count_kv is not 1")
    return _gpt2(metadata, config)


def _bloom(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    del config["attention_bias"]
    del config["rope_parameters"]
    return {"layer_norm_epsilon": config.pop("rms_norm_eps")}


def _mpt(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    del config["attention_bias"]
    del config["rope_parameters"]
    width, hidden = config.pop("intermediate_size"), config["hidden_size"]
    steepest = metadata.number("attention.max_alibi_bias")
    return {
        "attn_config": {"alibi": steepest > 0, "alibi_bias_max": steepest},
        "expansion_ratio": width // hidden,
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
    }


FAMILIES: dict[str, GgufFamily] = {
    "starcoder2": GgufFamily("Starcoder2ForCausalLM", "starcoder2", _starcoder2),
    "phi2": GgufFamily("PhiForCausalLM", "phi", _phi),
    "stablelm": GgufFamily("StableLmForCausalLM", "stablelm", _stablelm),
    "nemotron": GgufFamily("NemotronForCausalLM", "nemotron", _nemotron, norms_plus_one=True),
    "olmo": GgufFamily("OlmoForCausalLM", "olmo", _olmo, permuted=True, biases_permuted=False),
    "gptneox": GgufFamily("GPTNeoXForCausalLM", "gpt_neox", _gpt_neox),
    "falcon": GgufFamily("FalconForCausalLM", "falcon", _falcon),
    "bloom": GgufFamily("BloomForCausalLM", "bloom", _bloom),
    "mpt": GgufFamily("MptForCausalLM", "mpt", _mpt),
    "gpt2": GgufFamily("GPT2LMHeadModel", "gpt2", _gpt2),
    "starcoder": GgufFamily("GPTBigCodeForCausalLM", "gpt_bigcode", _starcoder),
}
