"""GGUF files of the newer families, whose tensors llama.cpp's converter changes on the way.

Names come from ggml's own package. Weights are rounded to the stored kind first, so that what the
converter moves stands for the same numbers.
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
from tests.actors.stage.weights.gguf_files import Kind, write_tokenizer

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
    for name, parameter in parameters.items():
        if _is_stored_as(kind, name, parameter):
            rounded = gguf.dequantize(gguf.quantize(parameter.data.numpy(), kind), kind)
            parameter.data.copy_(torch.from_numpy(rounded.reshape(parameter.shape)))
        for changed, tensor in change(name, parameter.data, config):
            called = changed
            if not changed.startswith("blk."):
                called = names.get_name(changed, try_suffixes=(".weight", ".bias"))
                assert called is not None, changed
            array = np.ascontiguousarray(tensor.numpy(), np.float32)
            if _is_stored_as(kind, called, tensor) and not any(part in called for part in wide):
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
    writer.add_context_length(config.max_position_embeddings)
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


def delta_rule(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Qwen3-Next's and Qwen3.5's: the heads of values of the latter are interleaved."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    each = values // keys

    def tiled(part: torch.Tensor, width: int) -> torch.Tensor:
        rest = part.shape[1:]
        return part.reshape(keys, each, width, *rest).transpose(0, 1).reshape(part.shape)

    def values_tiled(whole: torch.Tensor) -> torch.Tensor:
        kept = 2 * keys * key_dim
        return torch.cat([whole[:kept], tiled(whole[kept:], value_dim)])

    if name.endswith("in_proj_qkvz.weight"):
        sizes = [key_dim, key_dim, each * value_dim, each * value_dim]
        *qkv, z = (
            part.flatten(0, 1) for part in tensor.view(keys, -1, tensor.shape[1]).split(sizes, 1)
        )
        prefix = f"blk.{name.split('.')[2]}"
        yield f"{prefix}.attn_qkv.weight", torch.cat(qkv)
        yield f"{prefix}.attn_gate.weight", z
        return
    if "conv1d" in name:
        tensor = tensor.squeeze()
    if config.model_type != "qwen3_next":
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            tensor = values_tiled(tensor)
        elif name.endswith("in_proj_z.weight"):
            tensor = tiled(tensor, value_dim)
        elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
            tensor = tiled(tensor, 1)
        elif name.endswith("linear_attn.out_proj.weight"):
            tensor = tiled(tensor.T, value_dim).T
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    yield from experts_apart(name, tensor)


def delta_rule_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(3)
    rope = config.rope_parameters
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def as_they_are(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Correction biases have an ending in the file."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if name.endswith("expert_bias"):
        name += ".bias"
    yield from experts_apart(name, tensor)


def gpt_oss(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Experts are stored as (in, out), the columns of gate and up alternating."""
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if "experts." not in name:
        yield f"{name}.weight" if name.endswith("sinks") else name, tensor
        return
    ending = "bias" if name.endswith("_bias") else "weight"
    tensor = tensor if ending == "bias" else tensor.transpose(1, 2)
    if "down_proj" in name:
        yield f"{layer}.ffn_down_exps.{ending}", tensor
    else:
        yield f"{layer}.ffn_gate_exps.{ending}", tensor[:, ::2]
        yield f"{layer}.ffn_up_exps.{ending}", tensor[:, 1::2]


def short_convolutions(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    if "conv.conv" in name:
        tensor = tensor.squeeze(1) if tensor.dim() == 3 else tensor
    yield from as_they_are(name, tensor, config)


def permuted(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Halves of each head's queries and keys interleaved."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
    heads = getattr(config, key)
    return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def mamba2(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Granite's, Nemotron's and Falcon's, but for the multipliers of the last."""
    if config.model_type == "nemotron_h":
        name = name.replace("model.", "backbone.", 1)
    name = name.replace("moe.router.weight", "moe.router.layer.weight")  # as stored
    if name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt.bias" if "backbone" in name else "dt_proj.bias")
    elif name.endswith("conv1d.weight"):
        tensor = tensor.squeeze()
    elif name.endswith((".A_log", ".D")):
        tensor = tensor[:, None]
    elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        tensor = tensor.view(groups, -1)
    if name.endswith(".A_log"):
        tensor = -tensor.exp()
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith("input_linear.weight"):
        gate, up = tensor.chunk(2, dim=-2)
        is_shared = "shared_mlp" in name
        ending = ("_shexp" if config.num_local_experts else "") if is_shared else "_exps"
        yield f"{layer}.ffn_gate{ending}.weight", gate
        yield f"{layer}.ffn_up{ending}.weight", up
    elif name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        yield f"{layer}.ffn_down.weight", tensor
    else:
        yield from as_they_are(name, tensor, config)


def permuted_mamba2(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    yield from mamba2(name, permuted(name, tensor, config), config)


def falcon_h1(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """All multipliers are in the weights."""
    inside = config.attention_in_multiplier
    factors = {
        "down_proj": config.mlp_multipliers[1], "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * inside, "q_proj": inside, "v_proj": inside,
        "o_proj": config.attention_out_multiplier, "mamba.out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier, "embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    for part, factor in factors.items():
        if name.endswith(f"{part}.weight"):
            tensor = tensor * factor
    if name.endswith("mamba.in_proj.weight"):
        width, keys = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        parts = tensor.split([width, width, keys, keys, config.mamba_n_heads])
        pairs = zip(parts, config.ssm_multipliers, strict=True)
        tensor = torch.cat([part * factor * config.ssm_in_multiplier for part, factor in pairs])
    yield from mamba2(name, tensor, config)


def of_layers(writer: gguf.GGUFWriter, config: Any, kinds: tuple[str, ...]) -> None:
    """Layers without attention have no key heads."""
    given = getattr(config, "layers_block_type", None) or config.layer_types
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads if kind in kinds else 0 for kind in given])


def convolution_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    of_layers(writer, config, ("full_attention",))
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "lfm2_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def dense_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "granitemoehybrid":  # without Mamba, whose keys it has all the same
        granite_keys(writer, config)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    if (window := getattr(config, "sliding_window", None)) is not None:
        writer.add_sliding_window(window)
    if config.model_type == "exaone4" and window is not None:
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(pattern)
    if (scale := getattr(config, "logit_scale", None)) is not None:
        writer.add_logit_scale(scale)
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


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


def mixture_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    """Of a model without layers with states."""
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    kind = config.model_type
    if kind == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    if kind != "granitemoeshared":
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        writer.add_expert_feed_forward_length(width)
    else:
        granite_multipliers(writer, config)
    if kind == "qwen3_moe":  # as of a model of images
        writer.add_rope_dimension_sections([2, 3, 3, 0])
        writer.add_num_deepstack_layers(3)
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if kind == "minimax_m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "glm4_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_nextn_predict_layers(0)


def mamba2_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    heads = getattr(config, "mamba_n_heads", None) or config.mamba_num_heads
    head_dim = getattr(config, "mamba_d_head", None) or config.mamba_head_dim
    writer.add_ssm_conv_kernel(getattr(config, "mamba_d_conv", None) or config.conv_kernel)
    writer.add_ssm_state_size(getattr(config, "mamba_d_state", None) or config.ssm_state_size)
    writer.add_ssm_group_count(getattr(config, "mamba_n_groups", None) or config.n_groups)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_time_step_rank(heads)


def granite_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    of_layers(writer, config, ("attention", "full_attention"))
    mamba2_keys(writer, config)
    granite_multipliers(writer, config)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")


def granite_multipliers(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def nemotron_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    of_layers(writer, config, ("attention", "full_attention"))
    mamba2_keys(writer, config)
    mixture = "moe" in config.layers_block_type
    width = config.moe_intermediate_size if mixture else config.intermediate_size
    kinds = config.layers_block_type
    writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    if mixture:
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)


def falcon_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    mamba2_keys(writer, config)
    writer.add_vocab_size(config.vocab_size)
