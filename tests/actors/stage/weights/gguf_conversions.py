"""GGUF files of the newer families, whose tensors llama.cpp's converter changes on the way.

Names come from ggml's own package. Weights are rounded to the stored kind first, so that what the
converter moves stands for the same numbers; or they are drawn as the file has them and moved back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests import tiny_models
from tests.actors.stage.weights.gguf_files import DRAWN, Kind, stored, write_tokenizer

Tensors = Iterator[tuple[str, torch.Tensor]]
_PLAIN = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "ssm_norm", "ssm_a", "ssm_d")


class Plain(dict[str, Any]):
    """A config.json by attributes."""

    __getattr__ = dict.get


def convert(
    path: Path,
    architecture: str,
    variant: str,
    metadata: Callable[[gguf.GGUFWriter, Any], None],
    change: Callable[[str, torch.Tensor, Any], Tensors],
    kind: Kind = Kind.F32,
    wide: tuple[str, ...] = (),
    **overrides: Any,
) -> transformers.PreTrainedModel:
    """Write the file; returns the model that it stands for.

    metadata: what the architecture has beside the keys of all. change: of one of the folder's
    tensors, by the names that the package maps or, where they begin with "blk", maps to. kind: of
    matrices; wide: parts of the file's names of those that are stored as F32 all the same.
    """
    model = tiny_models.build(variant, **overrides).float()
    config: Any = model.config
    if config.model_type.startswith("gemma4"):  # where some attributes are of one layer alone
        config = Plain({**config.to_dict(), **tiny_models.VARIANTS[variant][1], **overrides})
    writer = gguf.GGUFWriter(str(path), architecture)
    _write_shared(writer, config)
    metadata(writer, config)
    write_tokenizer(writer, tiny_models.VOCAB_SIZE)
    code = next(c for c, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(code, config.num_hidden_layers)
    parameters = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()
    }
    if config.tie_word_embeddings:
        parameters.pop("lm_head.weight", None)
    generator = np.random.default_rng(5)
    for name, parameter in parameters.items():
        is_drawn = kind in DRAWN and _is_stored_as(kind, name, parameter)
        if _is_stored_as(kind, name, parameter) and not is_drawn:
            rounded = gguf.dequantize(gguf.quantize(parameter.data.numpy(), kind), kind)
            parameter.data.copy_(torch.from_numpy(rounded.reshape(parameter.shape)))
        # What the converter moves: where each of its numbers is in the folder's tensor.
        numbers = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
        moved = change(name, numbers, config)
        for changed, tensor in change(name, parameter.data, config):
            called = changed
            if not changed.startswith("blk."):
                called = names.get_name(changed, try_suffixes=(".weight", ".bias"))
                assert called is not None, changed
            array = np.ascontiguousarray(tensor.numpy(), np.float32)
            if is_drawn:
                raw = stored(array, kind, generator)
                writer.add_tensor(called, raw, raw_dtype=kind)
                meant = torch.from_numpy(gguf.dequantize(raw, kind)).flatten()
                parameter.data.view(-1)[next(moved)[1].flatten().long()] = meant
            elif _is_stored_as(kind, called, tensor) and not any(part in called for part in wide):
                writer.add_tensor(called, gguf.quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(called, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _is_stored_as(kind: Kind, name: str, tensor: torch.Tensor) -> bool:
    plain = any(part in name for part in (*_PLAIN, "conv", "mlp.gate.", "router", "expert_gate"))
    return kind != Kind.F32 and tensor.dim() > 1 and not plain


def _has(config: Any, name: str) -> bool:
    return name in (config if isinstance(config, Plain) else config.to_dict())


def _write_shared(writer: gguf.GGUFWriter, config: Any) -> None:
    def given(*names: str) -> Any:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if value is not None), None)

    writer.add_block_count(config.num_hidden_layers)
    if (length := given("max_position_embeddings")) is not None:
        writer.add_context_length(length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    has_mlp = config.model_type not in ("qwen3_5_moe_text", "nemotron_h")
    if has_mlp and (width := given("intermediate_size")) is not None:
        writer.add_feed_forward_length(width)
    if (head_dim := given("head_dim")) is not None and _has(config, "head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    number = given("num_local_experts", "num_experts", "n_routed_experts")
    if number and config.model_type != "nemotron_h":
        writer.add_expert_count(number)
        writer.add_expert_used_count(given("num_experts_per_tok", "top_k_experts"))
    if (eps := given("rms_norm_eps", "norm_eps", "layer_norm_epsilon")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    rope = given("rope_parameters") or {}
    if config.model_type.startswith("gemma4"):
        return
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def experts_apart(name: str, tensor: torch.Tensor) -> Tensors:
    """The fused experts are two tensors in the file."""
    prefix = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith("experts.gate_up_proj"):
        half = tensor.shape[1] // 2
        yield f"{prefix}.ffn_gate_exps.weight", tensor[:, :half]
        yield f"{prefix}.ffn_up_exps.weight", tensor[:, half:]
    elif name.endswith("experts.up_proj"):
        yield f"{prefix}.ffn_up_exps.weight", tensor
    elif name.endswith("experts.down_proj"):
        yield f"{prefix}.ffn_down_exps.weight", tensor
    else:
        yield name, tensor


def as_they_are(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Correction biases have an ending in the file."""
    name = name.replace("mlp.gate.moe_statics", "mlp.moe_statics")  # as stored
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if name.endswith("expert_bias"):
        name += ".bias"
    yield from experts_apart(name, tensor)


def permuted(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Halves of each head's queries and keys interleaved; of OLMo's biases, they are not."""
    endings = ("weight",) if config.model_type == "olmo" else ("weight", "bias")
    if not name.endswith(tuple(f"{q}_proj.{ending}" for q in "qk" for ending in endings)):
        return tensor
    key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
    heads = getattr(config, key)
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def with_pairs(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    yield name, permuted(name, tensor, config)


def qkv_fused() -> Callable[[str, torch.Tensor, Any], Tensors]:
    """All queries, keys and values in one tensor, as converters of some folders write them."""
    parts: list[torch.Tensor] = []

    def change(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
        if ".self_attn." not in name or ".o_proj." in name or ".dense." in name:
            yield name, tensor
            return
        of_kind = [part for part in parts if part.dim() == tensor.dim()]
        parts.append(tensor)
        if len(of_kind) == 2:
            layer, ending = name.split(".")[2], name.rpartition(".")[2]
            yield f"blk.{layer}.attn_qkv.{ending}", torch.cat([*of_kind, tensor])
            parts[:] = [part for part in parts if part.dim() != tensor.dim()]

    return change


def gemma4_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    layers, full = config.num_hidden_layers, config.global_head_dim
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    shared, inner = config.num_kv_shared_layers or 0, config.intermediate_size
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_head_count_kv(config.num_key_value_heads)
    if (few := config.num_global_key_value_heads) is not None:
        writer.add_head_count_kv([config.num_key_value_heads if each else few for each in slides])
    if config.use_double_wide_mlp:
        writer.add_feed_forward_length([inner] * (layers - shared) + [2 * inner] * shared)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_used_count(config.top_k_experts)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(config.head_dim)
    rotated = int(full * rope["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * rotated + [1e30] * (full // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def gemma4(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith("router.scale"):
        yield f"{layer}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"{layer}.ffn_down_exps.scale", tensor
    elif name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def latent_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    writer.add_head_count_kv(1)
    writer.add_vocab_size(config.vocab_size)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotated)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(rotated)
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    if config.model_type == "youtu":  # which has no experts
        writer.add_leading_dense_block_count(config.num_hidden_layers)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(0)
        return
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    if config.model_type == "deepseek_v3":
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def older_latent_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    """Of files with keys and values from the latents in one tensor."""
    latent_keys(writer, config)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length(config.v_head_dim)
    for key in ("key_length_mla", "value_length_mla"):
        del writer.kv_data[0][f"{writer.arch}.attention.{key}"]


def latent(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    if not name.endswith("kv_b_proj.weight"):
        yield from as_they_are(name, tensor, config)
        return
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    heads = tensor.view(config.num_attention_heads, sum(sizes), -1)
    keys, values = heads.split(sizes, dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values
