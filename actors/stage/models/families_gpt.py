"""Families derived from GPT-2: layer norms, and an MLP without a gate or parallel to attention."""

from __future__ import annotations

import math
from dataclasses import replace

from actors.stage.models.alibi import Alibi, bloom_slopes
from actors.stage.models.config import DecoderConfig
from actors.stage.models.families_llama import mistral
from actors.stage.models.family import (
    FULL,
    SLIDING,
    Family,
    rotates_in_windows,
    windows,
    with_alibi,
)
from actors.stage.models.keys import Keys
from actors.stage.models.names import Names
from actors.stage.models.rope import no_rope


def falcon(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Layer norms, GELU, no gate, q, k and v in one tensor. In 7B, attention and MLP read the same
    norm and heads share one key and value. In 40B and 180B (new_decoder_architecture), each has its
    own norm and key/value heads are shared by groups. In falcon-rw, ALiBi takes the place of the
    rotation."""
    new = keys.flag("new_decoder_architecture")
    one = keys.flag("multi_query", True) and not new
    num_kv_heads = keys.size("num_kv_heads", base.num_heads)  # means nothing in the older ones
    heads = num_kv_heads if new else base.num_heads
    parallel = keys.flag("parallel_attn", True) or new
    num_norms = keys.size("num_ln_in_parallel_attn", 2 if new else 1)
    names = base.names
    if new and num_norms == 2:
        names = replace(names, input_norm="ln_attn", mlp_norm="ln_mlp")
    elif parallel:
        names = replace(names, mlp_norm=None)
    bias = keys.flag("bias")
    if keys.flag("alibi"):
        alibi = Alibi(bloom_slopes(base.num_heads), rounds=True, divisor=math.sqrt(base.head_dim))
        base = with_alibi(base, alibi)
    return replace(
        base,
        names=names,
        norm="layer",
        norm_bias=True,
        parallel=parallel,
        num_kv_heads=1 if one else heads,
        inner_size=keys.size("ffn_hidden_size", 4 * base.hidden_size),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )


def starcoder2(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Mistral with layer norms, biases everywhere, and an MLP without a gate."""
    keys.only("mlp_type", "default")
    keys.only("norm_type", "layer_norm")
    bias = keys.flag("use_bias", True)
    config = replace(base, norm="layer", norm_bias=True)
    return replace(mistral(config, keys), qkv_bias=bias, out_bias=bias, mlp_bias=bias)


def gpt2(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Layer norms, learned positions, biases everywhere, no gate."""
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    return replace(
        base,
        norm="layer",
        norm_bias=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        inner_size=keys.size("n_inner", 4 * base.hidden_size),
        ropes=(no_rope(base.max_positions),) * base.num_layers,
    )


def opt(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """GPT-2 with ReLU; position 0 is row 2 of its table."""
    keys.only("do_layer_norm_before", True)
    keys.only("_remove_final_layer_norm", False)
    keys.only("word_embed_proj_dim", base.hidden_size)
    keys.only("layer_norm_elementwise_affine", True)
    keys.ignore("output_projection")
    bias = keys.flag("enable_bias", True)
    return replace(
        base,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        position_offset=2,
        ropes=(no_rope(base.max_positions),) * base.num_layers,
    )


def cohere(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Command R: attention and MLP read the same layer norm, without a bias; rotation pairs
    neighbors; logits are scaled. Published positions end before the length it was trained for."""
    keys.only("use_qk_norm", False)
    bias = keys.flag("attention_bias")
    reach = max(base.max_positions, int(keys.number("model_max_length", 0)))
    return replace(
        base,
        norm="layer",
        parallel=True,
        qkv_bias=bias,
        out_bias=bias,
        logit_scale=keys.number("logit_scale"),
        max_positions=reach,
        ropes=tuple(
            replace(
                rope,
                interleaved=True,
                max_positions=reach if rope.kind == "default" else rope.max_positions,
            )
            for rope in base.ropes
        ),
    )


def cohere2(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Command R7B and A: three of four layers have a window, the fourth none and no positions."""
    keys.only("rotary_pct", 1.0)
    keys.only("position_embedding_type", "rope_gptj")
    keys.only("order_of_interleaved_layers", "local_attn_first")
    keys.only("use_gated_activation", True)
    keys.only("use_parallel_block", True)
    keys.ignore("use_embedding_sharing", "use_parallel_embedding")
    keys.ignore("_sliding_window_pattern")  # beside `layer_types`, which count
    pattern = keys.size("sliding_window_pattern", 4)
    keys.only("layer_switch", pattern)
    kinds = [SLIDING if (i + 1) % pattern else FULL for i in range(base.num_layers)]
    return rotates_in_windows(windows(cohere(base, keys), keys, kinds))


_COHERE = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
_GPT2_SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}

FALCON = Names(
    embedding="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    qkv="self_attention.query_key_value",
    grouped=True,
    out="self_attention.dense",
    gate=None,
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)

FAMILIES: dict[str, Family] = {
    "FalconForCausalLM": Family(
        falcon,
        FALCON,
        {
            "activation": "gelu",
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        {"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation"},
    ),
    "Starcoder2ForCausalLM": Family(
        starcoder2,
        Names(gate=None, up="mlp.c_fc", down="mlp.c_proj"),
        {
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        {"rms_norm_eps": "norm_epsilon"},
    ),
    "GPT2LMHeadModel": Family(
        gpt2,
        Names(
            embedding="transformer.wte",
            positions="transformer.wpe",
            final_norm="transformer.ln_f",
            layer="transformer.h.{}.",
            input_norm="ln_1",
            mlp_norm="ln_2",
            qkv="attn.c_attn",
            out="attn.c_proj",
            gate=None,
            up="mlp.c_fc",
            down="mlp.c_proj",
            transposed=True,
        ),
        {
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        },
        {
            **_GPT2_SIZES,
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
    ),
    "OPTForCausalLM": Family(
        opt,
        Names(
            embedding="model.decoder.embed_tokens",
            positions="model.decoder.embed_positions",
            final_norm="model.decoder.final_layer_norm",
            layer="model.decoder.layers.{}.",
            input_norm="self_attn_layer_norm",
            mlp_norm="final_layer_norm",
            out="self_attn.out_proj",
            gate=None,
            up="fc1",
            down="fc2",
        ),
        {
            "activation_function": "relu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        {"hidden_act": "activation_function", "intermediate_size": "ffn_dim"},
    ),
    "CohereForCausalLM": Family(
        cohere, Names(mlp_norm=None), _COHERE, {"rms_norm_eps": "layer_norm_eps"}
    ),
    "Cohere2ForCausalLM": Family(
        cohere2,
        Names(mlp_norm=None),
        {**_COHERE, "rope_theta": 10_000.0, "sliding_window": 4096},
        {"rms_norm_eps": "layer_norm_eps"},
    ),
}
