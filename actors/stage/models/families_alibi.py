"""Families whose only positions are ALiBi's: layer norms, and an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from actors.stage.models.alibi import Alibi, bloom_slopes, mpt_slopes
from actors.stage.models.config import DecoderConfig
from actors.stage.models.families_gpt import FALCON
from actors.stage.models.family import Family, with_alibi
from actors.stage.models.keys import Keys
from actors.stage.models.names import Names


def bloom(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Layer norms, one of the embedding too, ALiBi, biases everywhere, no gate; q, k and v in one
    tensor, by head."""
    keys.only("apply_residual_connection_post_layernorm", False)
    return replace(
        with_alibi(base, Alibi(bloom_slopes(base.num_heads))),
        norm="layer",
        norm_bias=True,
        inner_size=4 * base.hidden_size,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def mpt(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Layer norms, ALiBi, GELU, no gate, no biases; q, k and v in one tensor."""
    keys.only("no_bias", True)
    keys.only("logit_scale", None)
    keys.only("embedding_fraction", 1.0)
    keys.only("norm_type", "low_precision_layernorm", "layernorm")
    keys.ignore("learned_pos_emb")  # read with `alibi: false` only
    attention = keys.inner("attn_config")
    attention.only("attn_type", "multihead_attention")
    attention.only("alibi", True)
    attention.only("clip_qkv", None)
    for key in ("qk_ln", "qk_gn", "prefix_lm", "attn_uses_sequence_id", "rope"):
        attention.only(key, False)
    attention.only("sliding_window_size", -1)
    # As in its authors' code; transformers takes 8 whatever the file says.
    slopes = mpt_slopes(base.num_heads, attention.number("alibi_bias_max", 8))
    return replace(
        with_alibi(base, Alibi(slopes)),
        norm="layer",
        inner_size=keys.size("expansion_ratio", 4) * base.hidden_size,
        attention_scale=attention.number("softmax_scale", base.attention_scale),
    )


_MPT = Family(
    mpt,
    Names(
        embedding="transformer.wte",
        final_norm="transformer.norm_f",
        layer="transformer.blocks.{}.",
        input_norm="norm_1",
        mlp_norm="norm_2",
        qkv="attn.Wqkv",
        out="attn.out_proj",
        gate=None,
        up="ffn.up_proj",
        down="ffn.down_proj",
    ),
    {
        "hidden_act": "gelu",
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    {
        "hidden_size": "d_model",
        "max_position_embeddings": "max_seq_len",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "rms_norm_eps": "layer_norm_epsilon",
    },
)

FAMILIES: dict[str, Family] = {
    "BloomForCausalLM": Family(
        bloom,
        replace(
            FALCON,  # whose names are BLOOM's
            embedding_norm="transformer.word_embeddings_layernorm",
        ),
        {
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        {
            "hidden_size": "n_embed",
            "max_position_embeddings": "seq_length",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "rms_norm_eps": "layer_norm_epsilon",
        },
    ),
    "MptForCausalLM": _MPT,
    "MPTForCausalLM": _MPT,  # as its authors' code, which is not run, names it
}
