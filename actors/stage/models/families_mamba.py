"""Models of Mamba-2 layers, with attention in some others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actors.stage.models.config import DecoderConfig, Mamba2, Multipliers
from actors.stage.models.families_deepseek import check_groups, deepseek_v3_routing
from actors.stage.models.family import FULL, Family, experts, without_positions
from actors.stage.models.keys import JsonObject, Keys
from actors.stage.models.names import MAMBA, MixerNames, Names

MAMBA_2 = "mamba"
# Names of kinds of layers since 2026, and before.
_KINDS = {"linear_attention": MAMBA_2, MAMBA_2: MAMBA_2, FULL: FULL, "attention": FULL}
_LETTERS = {"M": MAMBA_2, "*": FULL, "-": "mlp", "E": "moe"}


def nemotron_h(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Nemotron-H, Nemotron Nano 2 and 3: Mamba-2, attention without positions, MLPs and mixtures of
    experts are stored as layers of their own; here, a layer has the MLP that follows it."""
    stored = _stored_kinds(keys)
    places, kinds, mlps = _with_their_mlps(stored)
    base = without_positions(replace(base, num_layers=len(kinds), stored_at=places))
    keys.only("attention_bias", False)
    keys.only("mamba_hidden_act", "silu", "swish")
    keys.only("residual_in_fp32", False)
    keys.only("sliding_window", None)
    keys.only("num_query_groups", base.num_kv_heads)
    # What follows from other keys, is of initialization, or of how other implementations compute.
    # transformers takes time_step_min for the least step of prompts, but not of single tokens; the
    # models' own code has only time_step_limit.
    keys.ignore("chunk_size", "expand", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap")
    keys.ignore("norm_eps", "num_logits_to_keep", "rescale_prenorm_residual", "time_step_floor")
    keys.ignore("time_step_max", "time_step_min", "time_step_rank", "use_mamba_kernels")
    # Of layers that predict further tokens.
    keys.ignore("mtp_hybrid_override_pattern", "mtp_layers_block_type", "num_nextn_predict_layers")
    config = replace(
        base,
        sliding_windows=(None,) * base.num_layers,
        wide_norms=True,
        mlp_bias=keys.flag("mlp_bias"),
    )
    layers = tuple(kind == MAMBA_2 for kind in kinds)
    if not any(layers):
        raise ValueError("a model without layers of Mamba is not supported")
    config = with_mamba2(config, keys, layers, keys.size("mamba_head_dim", 64))
    if "moe" in mlps:
        return _nemotron_experts(config, keys, tuple(mlp == "moe" for mlp in mlps))
    keys.ignore(*_OF_EXPERTS)
    return config


def _nemotron_experts(base: DecoderConfig, keys: Keys, layers: tuple[bool, ...]) -> DecoderConfig:
    keys.only("mlp_bias", False)
    keys.only("moe_latent_size", None)
    keys.only("n_shared_experts", 1)
    config = replace(
        experts(base, keys, keys.size("n_routed_experts", 8)),
        routing=deepseek_v3_routing(keys),
        wide_router=True,
        expert_size=keys.size("moe_intermediate_size", 7688),
        expert_layers=layers,
        shared_expert_size=keys.size("moe_shared_expert_intermediate_size", 7688),
    )
    check_groups(config, config.routing)
    return config


def _stored_kinds(keys: Keys) -> list[str]:
    kinds = keys.get("layers_block_type") or keys.get("layer_types")
    letters = keys.get("hybrid_override_pattern")
    if kinds is None:
        kinds = [_LETTERS.get(letter, letter) for letter in letters or "ME*-"]
    known = {**_KINDS, "mlp": "mlp", "moe": "moe"}
    for kind in kinds:
        if kind not in known:
            supported = ", ".join(known)
            raise ValueError(f"a layer of {kind!r} is not supported; supported: {supported}")
    return [known[kind] for kind in kinds]


def _with_their_mlps(
    stored: Sequence[str],
) -> tuple[tuple[tuple[int, int | None], ...], list[str], list[str | None]]:
    """Of each layer: where its parts are stored, as in `DecoderConfig.stored_at`; the kind of the
    first, and of its MLP."""
    places: list[tuple[int, int | None]] = []
    for number, kind in enumerate(stored):
        if kind in (MAMBA_2, FULL):
            places.append((number, None))
        elif places and places[-1] == (number - 1, None):
            places[-1] = (number - 1, number)
        else:
            raise ValueError(f"layer {number}, of {kind}, does not follow Mamba or attention")
    mlps = [None if mlp is None else stored[mlp] for _, mlp in places]
    return tuple(places), [stored[first] for first, _ in places], mlps


def bamba(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Bamba: Mamba-2 in most layers, attention in others, of whose heads half is rotated."""
    attending = keys.get("attn_layer_indices") or ()
    kinds = [FULL if layer in attending else MAMBA_2 for layer in range(base.num_layers)]
    keys.only("attn_rotary_emb", base.ropes[0].dim)  # as the part of each head says that is rotated
    keys.ignore("layer_types", "layers_block_type", "num_logits_to_keep", "z_loss_coefficient")
    bias = keys.flag("attention_bias")
    config = replace(base, qkv_bias=bias, out_bias=bias, mlp_bias=keys.flag("mlp_bias"))
    return mamba2_by_width(config, keys, kinds)


def mamba2_by_width(
    base: DecoderConfig, keys: Keys, kinds: Sequence[str], width: int | None = None
) -> DecoderConfig:
    """Mamba-2 in the layers that kinds marks, whose values are of this width, by default
    `mamba_expand` times the hidden state's, and attention in the others."""
    if len(kinds) != base.num_layers or set(kinds) - set(_KINDS):
        raise ValueError(f"kinds of layers must be {' or '.join(_KINDS)} {base.num_layers}x")
    layers = tuple(_KINDS[kind] == MAMBA_2 for kind in kinds)
    keys.ignore(*(key for key in keys.values if key.startswith("mamba_")), "time_step_limit")
    # Of how weights are initialized.
    keys.ignore("time_step_max", "time_step_min", "time_step_floor")
    if not any(layers):
        return base
    keys.only("hidden_act", "silu", "swish")  # also that of the convolutions
    width = width or keys.size("mamba_expand", 2) * base.hidden_size
    heads, head_dim = keys.size("mamba_n_heads", 128), keys.get("mamba_d_head", "auto")
    head_dim = width // heads if head_dim == "auto" else keys.size("mamba_d_head")
    if head_dim * heads != width:
        raise ValueError(f"mamba_n_heads {heads} of {head_dim} features are not {width}")
    return with_mamba2(base, keys, layers, head_dim)


def with_mamba2(
    base: DecoderConfig, keys: Keys, layers: tuple[bool, ...], head_dim: int
) -> DecoderConfig:
    """Mamba-2 in these layers."""
    heads, groups = keys.size("mamba_n_heads", 128), keys.size("mamba_n_groups", 1)
    if heads % groups:
        raise ValueError(f"{heads} heads of Mamba-2 are no multiple of {groups} groups")
    mixer = Mamba2(
        taps=keys.size("mamba_d_conv", 4),
        num_groups=groups,
        num_heads=heads,
        state_dim=keys.size("mamba_d_state", 256),
        head_dim=head_dim,
        normed=keys.flag("mamba_rms_norm", True),
        norm_eps=base.norm_eps,
        step_limits=_step_limits(keys.get("time_step_limit", (0.0, math.inf))),
        bias=keys.flag("mamba_proj_bias"),
        conv_bias=keys.flag("mamba_conv_bias", True),
    )
    return replace(base, mixer=mixer, mixer_layers=layers)


def _step_limits(given: Sequence[Any]) -> tuple[float, float]:
    """Infinity is stored as itself, which is no JSON, or in an object, as by transformers."""
    least, most = (float(x["__float__"] if isinstance(x, dict) else x) for x in given)
    if not least <= most:
        raise ValueError(f"time_step_limit {given} is no range")
    return least, most


def falcon_h1(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Falcon-H1: attention and Mamba-2 side by side in every layer, and multipliers of what comes
    into and out of both, of the MLP, of the embedding and the logits."""
    for key in ("attention_bias", "mamba_proj_bias", "projectors_bias"):
        keys.only(key, False)
    keys.only("mamba_use_mlp", True)
    keys.only("attn_layer_indices", None)
    keys.ignore("layer_types", "layers_block_type", "mlp_expansion_factor", "num_logits_to_keep")
    width = keys.get("mamba_d_ssm")
    kinds = [MAMBA_2] * base.num_layers
    config = mamba2_by_width(base, keys, kinds, None if width is None else int(width))
    if keys.flag("mamba_rms_norm") and keys.flag("mamba_norm_before_gate"):
        raise ValueError("mamba_norm_before_gate True is not supported with mamba_rms_norm")
    attention_in, mixer_in = (
        keys.number(f"{part}_in_multiplier", 1.0) for part in ("attention", "ssm")
    )
    gates, values, mixer_keys, queries, steps = keys.get("ssm_multipliers", [1.0] * 5)
    mlp_gate, mlp = keys.get("mlp_multipliers", (1.0, 1.0))
    inputs = (queries, mixer_keys, values, gates, steps)
    return replace(
        config,
        mixer_layers=(),
        mixer_beside=True,
        mlp_bias=keys.flag("mlp_bias"),
        # Scores are products of two inputs.
        attention_scale=base.attention_scale * attention_in**2 * keys.number("key_multiplier", 1.0),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        logit_scale=keys.number("lm_head_multiplier", 1.0),
        multipliers=Multipliers(
            attention=attention_in * keys.number("attention_out_multiplier", 1.0),
            mixer=keys.number("ssm_out_multiplier", 1.0),
            mixer_inputs=tuple(mixer_in * float(factor) for factor in inputs),
            gate=float(mlp_gate),
            mlp=float(mlp),
        ),
    )


_OF_EXPERTS = (
    "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "n_group",
    "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok",
    "routed_scaling_factor", "topk_group",
)  # fmt: skip
_NEMOTRON_NAMES = Names(
    embedding="backbone.embeddings",
    final_norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    input_norm="norm",
    mlp_norm="norm",
    q="mixer.q_proj",
    k="mixer.k_proj",
    v="mixer.v_proj",
    out="mixer.o_proj",
    mixer=MixerNames(
        inputs="mixer.in_proj",
        conv="mixer.conv1d",
        decay_log="mixer.A_log",
        step_bias="mixer.dt_bias",
        skip="mixer.D",
        norm="mixer.norm",
        out="mixer.out_proj",
    ),
    gate=None,
    up="mixer.up_proj",
    down="mixer.down_proj",
    router="mixer.gate",
    correction_bias="mixer.gate.e_score_correction_bias",
    expert="mixer.experts.{}.",
    expert_gate=None,
    shared_expert="mixer.shared_experts.",
    # transformers' modules, as which peft names them, have another prefix than what is stored.
    stored_prefixes=(("mtp.", None), ("model.", "backbone.")),
)
_BAMBA_NAMES = Names(
    final_norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    mixer=MAMBA,
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
)
_NEMOTRON: JsonObject = {
    "head_dim": 128,
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,  # follows from the kinds of layers
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
}

FAMILIES: dict[str, Family] = {
    "NemotronHForCausalLM": Family(
        nemotron_h,
        _NEMOTRON_NAMES,
        _NEMOTRON,
        {
            "head_dim": "attention_head_dim",
            "hidden_act": "mlp_hidden_act",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_d_conv": "conv_kernel",
            "mamba_d_state": "ssm_state_size",
            "mamba_n_groups": "n_groups",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_proj_bias": "use_bias",
            "rms_norm_eps": "layer_norm_epsilon",
        },
    ),
    "FalconH1ForCausalLM": Family(
        falcon_h1,
        _BAMBA_NAMES,
        {
            "intermediate_size": 14336,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "max_position_embeddings": 8192,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
        },
    ),
    "BambaForCausalLM": Family(
        bamba,
        _BAMBA_NAMES,
        {
            "intermediate_size": 14336,
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
        rotates_part=True,
    ),
}
