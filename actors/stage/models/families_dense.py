"""Families of 2025 close to Llama: norms at other places, windows with another rotation or none, an
MLP without a gate, one that experts could share."""

from __future__ import annotations

from dataclasses import replace

from actors.stage.models.config import DecoderConfig
from actors.stage.models.families_llama import NORMS_AFTER, llama, olmo2
from actors.stage.models.family import (
    FULL,
    SLIDING,
    Family,
    rotates_in_windows,
    windows,
    windows_of_own_rotation,
    with_neighbors_rotated,
)
from actors.stage.models.keys import Keys
from actors.stage.models.names import Names


def olmo3(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """OLMo-2 with a window in three of four layers, whose rotation is not scaled."""
    kinds = [SLIDING if (i + 1) % 4 else FULL for i in range(base.num_layers)]
    config = windows(olmo2(base, keys), keys, kinds)
    return windows_of_own_rotation(config, keys, "rope_theta")


def exaone4(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Norms after attention and MLP instead of before, and of each query and key head. In the
    32 B model, three of four layers have a window, and the fourth has no positions."""
    window = keys.get("sliding_window")
    if keys.get("layer_types") is None and window is not None:
        pattern = keys.size("sliding_window_pattern")
        kinds = [SLIDING if (i + 1) % pattern else FULL for i in range(base.num_layers)]
    else:
        keys.ignore("sliding_window_pattern")  # beside `layer_types`, which count
        kinds = [FULL] * base.num_layers
    config = replace(windows(base, keys, kinds), qk_norm="head")
    return config if window is None else rotates_in_windows(config)


def seed_oss(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Llama with biases of q, k and v."""
    return replace(
        base,
        qkv_bias=keys.flag("attention_bias", True),
        out_bias=keys.flag("attention_out_bias"),
        mlp_bias=keys.flag("mlp_bias"),
    )


def ernie4_5(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """ERNIE 4.5 without experts: Llama that rotates pairs of neighbors."""
    bias = keys.flag("use_bias")
    config = with_neighbors_rotated(base)
    return replace(config, qkv_bias=bias, out_bias=bias, mlp_bias=bias)


def helium(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Llama that rotates pairs of neighbors."""
    return replace(with_neighbors_rotated(llama(base, keys)), out_bias=False)


def hunyuan(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Hunyuan without experts: Llama with a norm of each query and key head after the rotation,
    whose base a fixed alpha stretches."""
    keys.only("use_qk_norm", True)
    keys.only("use_cla", False)
    keys.only("mlp_bias", False)
    keys.only("norm_type", "rms")
    keys.only("use_mla", False)
    keys.only("use_rotary_pos_emb", True)
    keys.only("position_embedding_xdrope", False)
    keys.ignore(*_OF_OTHER_HUNYUANS)
    keys.ignore(*(key for key in keys.values if key.startswith(("vit_", "anyres_"))))
    bias = keys.flag("attention_bias")
    rope = base.ropes[0]
    given = keys.get("rope_scaling") or keys.get("rope_parameters", {})
    if rope.kind == "dynamic" and (alpha := given.get("alpha")):
        theta = rope.theta * float(alpha) ** (rope.dim / (rope.dim - 2))
        rope = replace(rope, kind="default", theta=theta)
    return replace(
        base,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        norms_last=True,
        ropes=(rope,) * base.num_layers,
    )


def arcee(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Llama whose MLP has no gate, but the square of ReLU."""
    return llama(base, keys)


_OF_OTHER_HUNYUANS = (
    "attention_head_dim", "cla_share_factor", "class_num", "dense_list", "enable_lm_head_fp32",
    "im_end_id", "im_newline_id", "im_start_id", "kv_lora_rank", "mask_init_id",
    "num_media_embeds", "org_vocab_size", "pad_id", "pool_type", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "sep_id", "skip_cls_token", "text_end_id", "text_start_id", "v_head_dim",
    "video_end_id", "video_start_id",
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "Olmo3ForCausalLM": Family(
        olmo3,
        NORMS_AFTER,
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
        },
        ropes_by_layer_type=True,
    ),
    "Exaone4ForCausalLM": Family(
        exaone4,
        NORMS_AFTER,
        {
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "SeedOssForCausalLM": Family(
        seed_oss,
        defaults={"head_dim": 128, "max_position_embeddings": 524288, "num_key_value_heads": 8},
    ),
    "Ernie4_5ForCausalLM": Family(
        ernie4_5,
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
    ),
    "HeliumForCausalLM": Family(
        helium,
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 20,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100_000.0,
        },
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        hunyuan,
        Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        rope_keys=("alpha",),
    ),
    "ArceeForCausalLM": Family(
        arcee,
        Names(gate=None),
        {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
}
