"""GGUF files written with ggml's own package from the tiny models, as llama.cpp's converter does.

The weights a file stands for are those that the package's own reader says, so the model that
`write` returns is an independent reading of the format.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests import tiny_models

ARCHITECTURES = {
    "Llama": "llama", "Mixtral": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3moe", "Gemma": "gemma", "Gemma2": "gemma2", "Gemma3": "gemma3",
    "Phi3": "phi3", "Olmo2": "olmo2", "Granite": "granite", "SmolLM3": "smollm3",
    "Ministral3": "mistral3", "Ernie4_5": "ernie4_5", "HunYuanDenseV1": "hunyuan-dense",
    "Arcee": "arcee",
}  # fmt: skip
_PERMUTED = ("llama", "granite", "smollm3", "mistral3", "arcee")
Kind = gguf.GGMLQuantizationType
_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def write(
    path: Path,
    variant: str = "llama",
    kind: Kind = Kind.F32,
    tune: Callable[[gguf.GGUFWriter], None] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    dtype: torch.dtype = torch.float32,
    architecture: str | None = None,
    max_tensors: int = 0,
    empty_first: bool = False,
    **overrides: Any,
) -> transformers.PreTrainedModel:
    """Write the file; returns the model in float32 of the weights that it stands for.

    kind: of all matrices. tune: adds to the metadata before it is written. tokenizer: writes
    another tokenizer's metadata than the tiny models'. dtype: of the model that is converted.
    architecture: the file's, where it is not that of the variant's class. max_tensors: of each of
    several parts, called after the file; empty_first: of which the first has none.
    """
    model = tiny_models.build(variant, **overrides).to(dtype).float()
    architecture = architecture or ARCHITECTURES[tiny_models.VARIANTS[variant][0]]
    writer = gguf.GGUFWriter(
        str(path), architecture, split_max_tensors=max_tensors, small_first_shard=empty_first
    )
    _write_metadata(writer, architecture, model.config)
    if tokenizer is None:
        write_tokenizer(writer, tiny_models.VOCAB_SIZE)
    else:
        tokenizer(writer)
    if tune is not None:
        tune(writer)
    code = next(c for c, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(code, model.config.num_hidden_layers)
    generator = np.random.default_rng(5)
    parameters = dict(model.named_parameters())
    if model.config.tie_word_embeddings:
        parameters.pop("lm_head.weight", None)
    for name, parameter in parameters.items():
        for stored_name, part in _parts(name, parameter.data, names):
            array = part.numpy()
            if architecture in _PERMUTED and (
                ".attn_q." in stored_name or ".attn_k." in stored_name
            ):
                heads = (
                    model.config.num_attention_heads
                    if "attn_q" in stored_name
                    else model.config.num_key_value_heads
                )
                array = _turned(array, heads)
            if architecture.startswith("gemma") and stored_name.endswith("norm.weight"):
                array = array + 1
            if array.ndim == 1 or "ffn_gate_inp" in stored_name:
                writer.add_tensor(stored_name, np.ascontiguousarray(array, np.float32))
                continue
            raw = stored(array, kind, generator)
            writer.add_tensor(stored_name, raw, raw_dtype=kind)
            meant = gguf.dequantize(raw, kind).reshape(array.shape)
            if architecture in _PERMUTED and (
                ".attn_q." in stored_name or ".attn_k." in stored_name
            ):
                meant = _turned_back(meant, heads)
            part.copy_(torch.from_numpy(np.ascontiguousarray(meant)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _parts(name: str, tensor: torch.Tensor, names: Any) -> list[tuple[str, torch.Tensor]]:
    """What a parameter is called in the file; the fused experts are two tensors there."""
    if name.endswith("experts.gate_up_proj"):
        layer, inner = name.split(".")[2], tensor.shape[1] // 2
        return [
            (f"blk.{layer}.ffn_gate_exps.weight", tensor[:, :inner]),
            (f"blk.{layer}.ffn_up_exps.weight", tensor[:, inner:]),
        ]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{name.split('.')[2]}.ffn_down_exps.weight", tensor)]
    stem, _, ending = name.rpartition(".")
    found = names.get_name(stem)
    assert found is not None, name
    return [(f"{found}.{ending}", tensor)]


def _turned(array: np.ndarray, heads: int) -> np.ndarray:  # type: ignore[type-arg]
    """Rows as llama.cpp has them: of each head, the two halves interleaved."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _turned_back(array: np.ndarray, heads: int) -> np.ndarray:  # type: ignore[type-arg]
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))


# Where a block has its float16 numbers, and those that keep the weights' deviation near that of the
# tiny models, of kinds that the package cannot write.
DRAWN: dict[Kind, dict[int, float]] = {
    Kind.Q2_K: {80: 3e-3, 82: 4.5e-3},
    Kind.Q3_K: {108: 1.2e-3},
    Kind.Q4_K: {0: 4e-4, 2: 3e-3},
    Kind.Q5_K: {0: 2e-4, 2: 3e-3},
    Kind.Q6_K: {208: 5e-5},
    Kind.IQ4_NL: {0: 7e-4},
    Kind.IQ4_XS: {0: 4e-5},
    Kind.TQ2_0: {64: 0.04},
}


def stored(array: np.ndarray, kind: Kind, generator: np.random.Generator) -> np.ndarray:  # type: ignore[type-arg]
    """Bytes of a kind: drawn for kinds that the package cannot write."""
    if kind not in DRAWN:
        return gguf.quantize(np.ascontiguousarray(array, np.float32), kind)
    *rows, features = array.shape
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = generator.integers(0, 256, (*rows, features // per_block, size), dtype=np.uint8)
    signs = generator.integers(0, 2, raw.shape[:-1], dtype=np.uint8) << 7  # for a mean of zero
    for at, number in DRAWN[kind].items():
        raw[..., at : at + 2] = np.array([number], np.float16).view(np.uint8)
        raw[..., at + 1] |= signs
    return raw.reshape(*rows, -1)


def _write_metadata(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    if architecture == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    base = rope["rope_theta"]
    if rope.get("alpha"):  # as converted: the base is stretched, and nothing else said of it
        base *= rope["alpha"] ** (head_dim / (head_dim - 2))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        writer.add_rope_scaling_orig_ctx_len(config.max_position_embeddings)
    writer.add_rope_freq_base(base)
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config, head_dim))
    if rope["rope_type"] == "longrope":
        for which in ("long", "short"):
            factors = np.array(rope[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture in ("gemma2", "gemma3", "phi3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_attention_scale(config.attention_multiplier)
    if getattr(config, "num_experts_per_tok", None):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def llama3_factors(config: Any, head_dim: int) -> np.ndarray:  # type: ignore[type-arg]
    """What the converter works out: the usual frequency by the one used."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    used, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    theta = config.rope_parameters["rope_theta"]
    plain = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    return (plain / used.numpy()).astype(np.float32)


def write_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """The tiny models' byte-level tokenizer, and one merge."""
    specials = [tiny_models.EOS, tiny_models.TURN_END, tiny_models.TURN_START]
    tokens = [*sorted(bytes_to_unicode().values()), *specials, "th"]
    padding = [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(specials)
    kinds.append(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens + padding)
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * len(padding))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(tiny_models.EOS_TOKEN_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_TEMPLATE)
