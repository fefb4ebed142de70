"""Models most of whose layers keep a state of fixed size in place of keys and values."""

from __future__ import annotations

from dataclasses import replace

from actors.stage.models.config import DecoderConfig, LinearAttention, ShortConv
from actors.stage.models.families_moe import some_experts
from actors.stage.models.family import FULL, Family, experts
from actors.stage.models.keys import JsonObject, Keys
from actors.stage.models.names import MixerNames, Names, StackedNames, of_images
from kernels.layer_form import Routing

_LINEAR, _CONV = "linear_attention", "conv"


def qwen3_next(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Qwen3-Next and Qwen3-Coder-Next: gated delta rules in three layers of four, gated attention
    in the others, and a mixture of experts beside a shared one."""
    config = some_experts(_delta_rule(base, keys), keys, 512)
    return replace(config, shared_expert_size=keys.size("shared_expert_intermediate_size", 512))


def qwen3_5(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Qwen3.5 and 3.6, dense: gated delta rules in three layers of four, gated attention in the
    others."""
    return _delta_rule(base, keys)


def qwen3_5_moe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Qwen3.5 and 3.6 with a mixture of experts beside a shared one in every layer."""
    config = experts(_delta_rule(base, keys), keys, keys.size("num_experts", 256))
    return replace(
        config,
        normalizes_expert_weights=True,
        expert_size=keys.size("moe_intermediate_size", 512),
        shared_expert_size=keys.size("shared_expert_intermediate_size", 512),
    )


def qwen3_5_images(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """The decoder of Qwen3.5 or 3.6 with images; images are refused, and their weights not
    read."""
    return base


def lfm2(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """LFM2: gated convolutions of three tokens, and attention in some layers."""
    inner = int(keys.get("block_ff_dim") or keys.size("intermediate_size", 12288))
    if keys.flag("block_auto_adjust_ff_dim", True):
        inner = int(keys.number("block_ffn_dim_multiplier", 1.0) * (2 * inner // 3))
        multiple = keys.size("block_multiple_of", 256)
        inner = -(-inner // multiple) * multiple
    else:
        keys.ignore("block_ffn_dim_multiplier", "block_multiple_of")
    return replace(_convolutions(base, keys), inner_size=inner)


def lfm2_moe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """LFM2 with a mixture of experts in all layers but the first ones, chosen by sigmoid scores
    with a correction bias."""
    keys.only("use_expert_bias", True)
    num_dense = int(keys.number("num_dense_layers", 2))
    return replace(
        experts(_convolutions(base, keys), keys, keys.size("num_experts", 32)),
        expert_size=keys.size("moe_intermediate_size", 1792),
        expert_layers=tuple(layer >= num_dense for layer in range(base.num_layers)),
        normalizes_expert_weights=keys.flag("norm_topk_prob", True),
        routing=Routing("sigmoid", least_sum=1e-6, scale=keys.number("routed_scaling_factor", 1.0)),
    )


def _delta_rule(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    every = keys.size("full_attention_interval", 4)
    usual = [FULL if (layer + 1) % every == 0 else _LINEAR for layer in range(base.num_layers)]
    bias = keys.flag("attention_bias")
    heads, key_heads = (
        keys.size(f"linear_num_{kind}_heads", number)
        for kind, number in (("value", 32), ("key", 16))
    )
    if heads % key_heads:
        raise ValueError(f"linear_num_value_heads {heads}: no multiple of {key_heads} key heads")
    keys.only("hidden_act", "silu", "swish")  # also that of the convolutions
    # Of heads that predict further tokens, and of how other implementations compute.
    keys.ignore("mamba_ssm_dtype", "mlp_only_layers", "mtp_num_hidden_layers")
    keys.ignore("mtp_use_dedicated_embeddings")
    keys.only("attn_output_gate", True)
    keys.only("output_gate_type", "swish", "silu")  # of the results of linear attention
    return replace(
        base,
        qk_norm="head",
        norm_offset=1.0,
        qkv_bias=bias,
        out_bias=bias,
        attention_gate=True,
        mixer=LinearAttention(
            taps=keys.size("linear_conv_kernel_dim", 4),
            num_key_heads=key_heads,
            num_heads=heads,
            key_dim=keys.size("linear_key_head_dim", 128),
            value_dim=keys.size("linear_value_head_dim", 128),
        ),
        mixer_layers=_mixer_layers(base, keys, _LINEAR, usual),
    )


def _convolutions(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    attending = keys.get("full_attn_idxs", range(base.num_layers))
    usual = [FULL if layer in attending else _CONV for layer in range(base.num_layers)]
    # Of other implementations, or fixed in transformers'.
    keys.ignore("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale")
    keys.ignore("block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out")
    keys.ignore("conv_use_xavier_init", "num_heads", "use_pos_enc")
    tied = keys.flag("tie_embedding", keys.flag("tie_word_embeddings", True))
    return replace(
        base,
        norm_eps=keys.number("norm_eps", 1e-5),
        qk_norm="head",
        tied_embeddings=tied,
        mixer=ShortConv(taps=keys.size("conv_L_cache", 3), bias=keys.flag("conv_bias")),
        mixer_layers=_mixer_layers(base, keys, _CONV, usual),
    )


def _mixer_layers(base: DecoderConfig, keys: Keys, kind: str, usual: list[str]) -> tuple[bool, ...]:
    kinds = keys.get("layer_types", usual)
    if len(kinds) != base.num_layers or set(kinds) - {FULL, kind}:
        raise ValueError(f"layer_types must name {FULL} or {kind} {base.num_layers}x")
    return tuple(found == kind for found in kinds)


_SHARED = Names(shared_expert="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate")
_MTP = (("mtp.", None),)
_QWEN: JsonObject = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.25,
}
_QWEN_MOE: JsonObject = {**_QWEN, "num_experts_per_tok": 8, "num_key_value_heads": 2}
_APART = MixerNames(
    inputs="linear_attn.in_proj_qkv",
    z="linear_attn.in_proj_z",
    rates="linear_attn.in_proj_b",
    decays="linear_attn.in_proj_a",
)
_STACKED = StackedNames(  # or stored apart, as by tools that quantize
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    quant_methods=("awq", "compressed-tensors", "fp8", "gptq"),
)
_IMAGES = (*_MTP, *of_images("visual"))
_MROPE = ("mrope_section", "mrope_interleaved")
_LFM2_NAMES = Names(
    final_norm="model.embedding_norm",
    input_norm="operator_norm",
    mlp_norm="ffn_norm",
    out="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    mixer=MixerNames(inputs="conv.in_proj", conv="conv.conv", out="conv.out_proj"),
)
_LFM2: JsonObject = {
    "max_position_embeddings": 128_000,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
}
_QWEN3_5 = Family(
    qwen3_5,
    Names(mixer=_APART, stored_prefixes=_IMAGES),
    _QWEN,
    rotates_part=True,
    rope_keys=_MROPE,
)
_QWEN3_5_MOE = Family(
    qwen3_5_moe,
    replace(_SHARED, mixer=_APART, stacked=_STACKED, stored_prefixes=_IMAGES),
    {**_QWEN_MOE, "intermediate_size": 512},
    rotates_part=True,
    rope_keys=_MROPE,
)

FAMILIES: dict[str, Family] = {
    "Qwen3NextForCausalLM": Family(
        qwen3_next,
        replace(_SHARED, stored_prefixes=_MTP),
        {
            **_QWEN_MOE,
            "intermediate_size": 5632,
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_experts_per_tok": 10,
        },
        rotates_part=True,
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5ForConditionalGeneration": replace(
        _QWEN3_5, inner="text_config", kinds={"qwen3_5_text": _QWEN3_5}, describe=qwen3_5_images
    ),
    "Qwen3_5MoeForConditionalGeneration": replace(
        _QWEN3_5_MOE,
        inner="text_config",
        kinds={"qwen3_5_moe_text": _QWEN3_5_MOE},
        describe=qwen3_5_images,
    ),
    "Lfm2ForCausalLM": Family(lfm2, _LFM2_NAMES, _LFM2),
    "Lfm2MoeForCausalLM": Family(
        lfm2_moe,
        replace(
            _LFM2_NAMES,
            router="feed_forward.gate",
            correction_bias="feed_forward.expert_bias",
            expert="feed_forward.experts.{}.",
            expert_gate="w1",
            expert_up="w3",
            expert_down="w2",
        ),
        {**_LFM2, "num_experts_per_tok": 4},
    ),
}
