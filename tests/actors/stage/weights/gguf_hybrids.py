"""What llama.cpp's converter makes of models with states; see `gguf_conversions`."""

from __future__ import annotations

from typing import Any

import gguf
import torch

from tests.actors.stage.weights.gguf_conversions import (
    Tensors,
    as_they_are,
    experts_apart,
    permuted,
)
from tests.actors.stage.weights.gguf_mixtures import granite_multipliers


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


def delta_rule_grouped(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """As the first converters left what comes into Qwen3-Next's linear attention."""
    if name.endswith("in_proj_qkvz.weight"):
        yield f"blk.{name.split('.')[2]}.ssm_in.weight", tensor
    else:
        yield from delta_rule(name, tensor, config)


def delta_rule_keys_of_layers(writer: gguf.GGUFWriter, config: Any) -> None:
    """As converters name the layers today, and those that predict further tokens behind them."""
    delta_rule_keys(writer, config)
    keeps = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", [*keeps, False])
    writer.add_full_attention_interval(7)  # which the other key overrules


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


def short_convolutions(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    if "conv.conv" in name:
        tensor = tensor.squeeze(1) if tensor.dim() == 3 else tensor
    yield from as_they_are(name, tensor, config)


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


def bamba_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    of_layers(writer, config, ("attention", "full_attention"))
    mamba2_keys(writer, config)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads // 2)
    writer.add_rope_scaling_finetuned(True)


def nemotron_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    of_layers(writer, config, ("attention", "full_attention"))
    mamba2_keys(writer, config)
    mixture = "moe" in config.layers_block_type
    width = config.moe_intermediate_size if mixture else config.intermediate_size
    kinds = config.layers_block_type
    if not mixture:  # as converters write for every model that has the key
        writer.add_expert_group_count(1)
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
