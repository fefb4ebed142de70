"""Llama and families close to it: other biases, windows, multipliers, fused tensors."""

from __future__ import annotations

from dataclasses import replace

from actors.stage.models.config import DecoderConfig
from actors.stage.models.family import (
    FULL,
    SLIDING,
    Family,
    experts,
    in_units,
    windows,
    with_neighbors_rotated,
)
from actors.stage.models.keys import Keys
from actors.stage.models.names import Names, StackedNames
from actors.stage.models.rope import no_rope


def llama(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Norms (RMS) before attention and MLP, rotary positions, gated MLP. Yi is one."""
    bias = keys.flag("attention_bias")
    return replace(base, qkv_bias=bias, out_bias=bias, mlp_bias=keys.flag("mlp_bias"))


def mistral(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Llama without biases; the sliding window, if any, is in every layer."""
    return replace(base, sliding_windows=(keys.get("sliding_window"),) * base.num_layers)


def ministral(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Mistral with the sliding window in some layers."""
    return windows(base, keys, [SLIDING] * base.num_layers)


def qwen2(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Llama with biases of q, k and v; upper layers may have a sliding window."""
    keys.ignore("attention_bias")
    return replace(_qwen_windows(base, keys), qkv_bias=True)


def qwen3(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Llama with a norm of each query and key head."""
    keys.only("use_qk_norm", True)
    bias = keys.flag("attention_bias")
    return replace(_qwen_windows(base, keys), qkv_bias=bias, out_bias=bias, qk_norm="head")


def phi3(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Phi-3 and Phi-4: Llama with fused projections; some rotate a part of each head only."""
    keys.only("full_attn_mod", 1)
    keys.only("interpolate_factor", 1)
    return mistral(base, keys)


def olmo2(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Norms after attention and MLP instead of before, and of all of q and all of k."""
    bias = keys.flag("attention_bias")
    return replace(base, qkv_bias=bias, out_bias=bias, qk_norm="whole")


def granite(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Llama with four multipliers."""
    config = replace(
        llama(base, keys),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        attention_scale=keys.number("attention_multiplier", 1.0),
        logit_scale=1 / keys.divisor("logits_scaling", 1.0),
    )
    return in_units(config, keys.divisor("residual_multiplier", 1.0))


def smollm3(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Llama without positions in every fourth layer (NoPE)."""
    every = keys.size("no_rope_layer_interval", 4)
    rotates = keys.get("no_rope_layers") or [(i + 1) % every for i in range(base.num_layers)]
    nope = no_rope(base.max_positions)
    ropes = [rope if has else nope for has, rope in zip(rotates, base.ropes, strict=True)]
    config = replace(llama(base, keys), ropes=tuple(ropes))
    if not keys.flag("use_sliding_window"):
        keys.ignore("layer_types", "sliding_window")
        return config
    return windows(config, keys, [FULL if has else SLIDING for has in rotates])


def glm(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """GLM-4: half of each head is rotated, in pairs of neighbors. The 0414 models (Glm4) have
    norms before and after attention and MLP."""
    return replace(with_neighbors_rotated(base), qkv_bias=keys.flag("attention_bias"))


def internlm2(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Llama with q, k and v in one tensor, grouped by key/value head."""
    bias = keys.flag("bias")
    return replace(base, qkv_bias=bias, out_bias=bias)


def mixtral(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Mistral with a mixture of experts in every layer."""
    return replace(
        experts(mistral(base, keys), keys, keys.size("num_local_experts", 8)),
        expert_size=base.inner_size,
        normalizes_expert_weights=True,
    )


def olmoe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Llama with norms of all of q and all of k, and a mixture of experts in every layer."""
    number = keys.get("num_experts") or keys.size("num_local_experts", 64)
    config = experts(olmo2(base, keys), keys, number)
    return replace(config, expert_size=base.inner_size)


def gpt_oss(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Experts with biases and a clamped SwiGLU in every layer, a sink in each head's attention, and
    a window in every other layer."""
    keys.only("hidden_act", "silu")
    keys.only("swiglu_alpha", 1.702)
    keys.only("swiglu_limit", 7.0)
    keys.only("experts_per_token", keys.get("num_experts_per_tok"))
    keys.ignore("initial_context_length")  # the rotation's original positions
    if not keys.get("rope_parameters") and not keys.get("rope_scaling"):
        raise KeyError("rope_parameters")
    bias = keys.flag("attention_bias", True)
    kinds = [FULL if i % 2 else SLIDING for i in range(base.num_layers)]
    config = experts(windows(base, keys, kinds), keys, keys.size("num_local_experts"))
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        activation="clamped_swiglu",
        expert_size=base.inner_size,
        expert_bias=True,
        normalizes_expert_weights=True,
    )


def _qwen_windows(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """`layer_types`, or the layers from `max_window_layers` on, if `use_sliding_window`."""
    if not keys.flag("use_sliding_window"):
        keys.ignore("layer_types", "sliding_window")
        return base
    first = int(keys.get("max_window_layers", 0))
    return windows(base, keys, [SLIDING if i >= first else FULL for i in range(base.num_layers)])


_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_GLM = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "rms_norm_eps": 1.5625e-7,
}
NORMS_AFTER = Names(
    input_norm=None,
    attention_out_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_out_norm="post_feedforward_layernorm",
)
_FUSED_MLP = Names(gate=None, gate_up="mlp.gate_up_proj")

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama, defaults={"max_position_embeddings": 2048}),
    "MistralForCausalLM": Family(mistral, defaults=_MISTRAL),
    "MinistralForCausalLM": Family(ministral, defaults=_MISTRAL),
    "Qwen2ForCausalLM": Family(qwen2, defaults=QWEN),
    "Qwen3ForCausalLM": Family(qwen3, defaults={**QWEN, "head_dim": 128}),
    "Phi3ForCausalLM": Family(
        phi3,
        replace(_FUSED_MLP, qkv="self_attn.qkv_proj"),
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        rotates_part=True,
    ),
    "Olmo2ForCausalLM": Family(
        olmo2,
        NORMS_AFTER,
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    ),
    "GraniteForCausalLM": Family(granite, defaults={"max_position_embeddings": 2048}),
    "SmolLM3ForCausalLM": Family(
        smollm3,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
    ),
    "GlmForCausalLM": Family(glm, _FUSED_MLP, _GLM, rotates_part=True),
    "Glm4ForCausalLM": Family(
        glm,
        replace(
            _FUSED_MLP,
            attention_out_norm="post_self_attn_layernorm",
            mlp_out_norm="post_mlp_layernorm",
        ),
        _GLM,
        rotates_part=True,
    ),
    "InternLM2ForCausalLM": Family(
        internlm2,
        Names(
            embedding="model.tok_embeddings",
            head="output",
            input_norm="attention_norm",
            mlp_norm="ffn_norm",
            qkv="attention.wqkv",
            grouped=True,
            out="attention.wo",
            gate="feed_forward.w1",
            up="feed_forward.w3",
            down="feed_forward.w2",
        ),
        {"max_position_embeddings": 2048},
    ),
    "MixtralForCausalLM": Family(
        mixtral,
        Names(
            router="block_sparse_moe.gate",
            expert="block_sparse_moe.experts.{}.",
            expert_gate="w1",
            expert_up="w3",
            expert_down="w2",
        ),
        {
            **_MISTRAL,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
        },
    ),
    "OlmoeForCausalLM": Family(
        olmoe,
        defaults={
            "max_position_embeddings": 4096,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-5,
        },
    ),
    "GptOssForCausalLM": Family(
        gpt_oss,
        Names(
            sinks="self_attn.sinks",
            router="mlp.router",
            stacked=StackedNames(
                "mlp.experts.gate_up_proj",
                "mlp.experts.down_proj",
                as_inputs=True,
                alternates=True,
                quant_methods=("mxfp4",),
            ),
        ),
        {
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
        },
    ),
}
