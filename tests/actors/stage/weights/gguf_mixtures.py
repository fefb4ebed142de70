"""What llama.cpp's converter makes of mixtures of experts; see `gguf_conversions`."""

from __future__ import annotations

from typing import Any

import gguf
import torch

from tests.actors.stage.weights.gguf_conversions import Tensors, experts_apart
from tests.actors.stage.weights.gguf_files import llama3_factors


def llama4(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Experts are stored as (in, out), gate beside up."""
    if ".experts." in name:
        tensor = tensor.transpose(1, 2)
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


def mixture_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    """Of a model without layers with states."""
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config, head_dim))
    kind = config.model_type
    if kind == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    if kind == "llama4_text":
        writer.add_feed_forward_length(config.intermediate_size_mlp)
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if kind == "granitemoehybrid":  # without Mamba, whose keys it has all the same
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if not kind.startswith("granite"):
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
    if kind == "ernie4_5_moe":
        shared = config.moe_num_shared_experts
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_used_count(config.moe_k)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(shared)
        writer.add_expert_shared_feed_forward_length(shared * config.moe_intermediate_size)
    if kind == "hunyuan_v1_moe":
        writer.add_expert_used_count(config.moe_topk)
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    if kind in ("glm4_moe", "dots1", "exaone_moe"):
        given = config.to_dict()
        shared = given.get("n_shared_experts") or config.num_shared_experts
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_shared_count(shared)
        writer.add_leading_dense_block_count(given.get("first_k_dense_replace", 1))
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_nextn_predict_layers(0)
    if kind == "exaone_moe":
        writer.add_expert_shared_feed_forward_length(shared * config.moe_intermediate_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_sliding_window(config.sliding_window)
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(slides)


def granite_multipliers(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
