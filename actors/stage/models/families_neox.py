"""Families with layer norms and rotary positions, most of which rotate a part of each head."""

from __future__ import annotations

from dataclasses import replace

from actors.stage.models.config import DecoderConfig
from actors.stage.models.family import Family, without_positions
from actors.stage.models.keys import Keys
from actors.stage.models.names import Names
from actors.stage.models.rope import Rope, read_rope


def gpt_neox(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """GPT-NeoX and Pythia: layer norms, biases everywhere, no gate, a quarter of each head rotated;
    attention and MLP read a norm each of the same hidden state. q, k and v in one tensor, by
    head."""
    part, theta = keys.number("rotary_pct", 0.25), keys.number("rotary_emb_base", 10_000.0)
    given = {**keys.values, "partial_rotary_factor": part, "rope_theta": theta}
    rope = read_rope(given, base.head_dim, base.max_positions)
    bias = keys.flag("attention_bias", True)
    return replace(
        base,
        norm="layer",
        norm_bias=True,
        parallel=keys.flag("use_parallel_residual", True),
        num_kv_heads=base.num_heads,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        ropes=(rope,) * base.num_layers,
    )


def gpt_j(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """GPT-J: attention and MLP read the same layer norm; pairs of neighbors are rotated in a part
    of each head; biases of the MLP and the head."""
    keys.only("rotary", True)
    dim = keys.size("rotary_dim", 64)
    if dim % 2 or dim > base.head_dim:
        raise ValueError(f"rotary_dim {dim} does not fit in heads of {base.head_dim}")
    rope = Rope("default", dim, 10_000.0, base.max_positions, interleaved=True)
    return replace(
        base,
        norm="layer",
        norm_bias=True,
        parallel=True,
        inner_size=keys.size("n_inner", 4 * base.hidden_size),
        mlp_bias=True,
        head_bias=True,
        ropes=(rope,) * base.num_layers,
    )


def gpt_bigcode(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """StarCoder and SantaCoder: GPT-2 whose heads share one key and value."""
    keys.only("scale_attn_weights", True)
    keys.only("add_cross_attention", False)
    keys.ignore("scale_attention_softmax_in_fp32")  # which softmax always is
    keys.ignore("pad_key_length", "pre_allocate_kv_cache", "validate_runner_input")
    shares = keys.flag("multi_query", True)
    return replace(
        without_positions(base),
        names=replace(base.names, grouped=not shares),
        norm="layer",
        norm_bias=True,
        num_kv_heads=1 if shares else base.num_heads,
        inner_size=keys.size("n_inner", 4 * base.hidden_size),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def phi(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Phi-1, Phi-1.5 and Phi-2: attention and MLP read the same layer norm; biases everywhere, of
    the head too; no gate, a part of each head rotated."""
    keys.only("qk_layernorm", False)
    return replace(
        base,
        norm="layer",
        norm_bias=True,
        parallel=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def stablelm(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """StableLM 3B, Zephyr and StableLM 2 1.6B: Llama with layer norms, a quarter of each head
    rotated."""
    keys.only("qk_layernorm", False)
    parallel = keys.flag("use_parallel_residual")
    return replace(
        base,
        names=replace(base.names, mlp_norm=None) if parallel else base.names,
        norm="layer",
        norm_bias=True,
        parallel=parallel,
        qkv_bias=keys.flag("use_qkv_bias"),
    )


def nemotron(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Nemotron-4 and Minitron: layer norms of weight 1 + w, the square of ReLU, no gate, half of
    each head rotated."""
    bias = keys.flag("attention_bias")
    keys.only("kv_channels", base.head_dim)  # by these names in older files, beside the others
    keys.only("rope_percent", base.ropes[0].dim / base.head_dim)
    return replace(
        base,
        norm="layer",
        norm_bias=True,
        norm_offset=1.0,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
    )


def olmo(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """OLMo (the first): Llama with layer norms without weights."""
    keys.only("clip_qkv", None)
    bias = keys.flag("attention_bias")
    return replace(
        base, norm="layer", norm_weights=False, norm_eps=1e-5, qkv_bias=bias, out_bias=bias
    )


_GPT_SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
_LAYER_NORM_EPS = {"rms_norm_eps": "layer_norm_eps"}

FAMILIES: dict[str, Family] = {
    "GPTNeoXForCausalLM": Family(
        gpt_neox,
        Names(
            embedding="gpt_neox.embed_in",
            final_norm="gpt_neox.final_layer_norm",
            layer="gpt_neox.layers.{}.",
            qkv="attention.query_key_value",
            grouped=True,
            out="attention.dense",
            gate=None,
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
            stored_prefixes=(("embed_out.", "lm_head."),),
        ),
        {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048},
        _LAYER_NORM_EPS,
        rotates_part=True,
    ),
    "GPTJForCausalLM": Family(
        gpt_j,
        Names(
            embedding="transformer.wte",
            final_norm="transformer.ln_f",
            layer="transformer.h.{}.",
            input_norm="ln_1",
            mlp_norm=None,
            q="attn.q_proj",
            k="attn.k_proj",
            v="attn.v_proj",
            out="attn.out_proj",
            gate=None,
            up="mlp.fc_in",
            down="mlp.fc_out",
        ),
        {
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 2048,
        },
        _GPT_SIZES,
        rotates_part=True,
    ),
    "GPTBigCodeForCausalLM": Family(
        gpt_bigcode,
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
        ),
        {
            "activation_function": "gelu_pytorch_tanh",
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        },
        _GPT_SIZES,
    ),
    "PhiForCausalLM": Family(
        phi,
        Names(
            final_norm="model.final_layernorm",
            mlp_norm=None,
            out="self_attn.dense",
            gate=None,
            up="mlp.fc1",
            down="mlp.fc2",
        ),
        {
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.5,
        },
        _LAYER_NORM_EPS,
        rotates_part=True,
    ),
    "StableLmForCausalLM": Family(
        stablelm,
        defaults={
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
        },
        renamed=_LAYER_NORM_EPS,
        rotates_part=True,
    ),
    "NemotronForCausalLM": Family(
        nemotron,
        Names(gate=None),
        {
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        {"rms_norm_eps": "norm_eps"},
        rotates_part=True,
    ),
    "OlmoForCausalLM": Family(olmo, defaults={"max_position_embeddings": 2048}),
}
