"""Families whose mixtures of experts are those of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from actors.stage.models.config import DecoderConfig
from actors.stage.models.family import FULL, SLIDING, Family, experts, rotates_in_windows, windows
from actors.stage.models.keys import JsonObject, Keys
from actors.stage.models.names import Names
from kernels.layer_form import Routing


def glm4_moe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """GLM-4.5, 4.6, 4.7 and Air: half of each head is rotated, its halves against each other; some
    norm q and k. Mixtures as in DeepSeek-V3."""
    config = deepseek_v3_experts(base, keys)
    qk_norm = "head" if keys.flag("use_qk_norm") else "none"
    return replace(config, qkv_bias=keys.flag("attention_bias"), qk_norm=qk_norm)


def solar_open(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Solar Open: Llama with a mixture in every layer, as in DeepSeek-V3."""
    keys.only("first_k_dense_replace", 0)
    keys.only("use_qk_norm", False)
    config = deepseek_v3_experts(base, keys)
    return replace(
        config,
        qkv_bias=keys.flag("attention_bias"),
        inner_size=base.inner_size or config.expert_size,  # of no layer
    )


def dots1(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """dots.llm1: norms of each query and key head, windows in upper layers, if any, and mixtures as
    in DeepSeek-V3."""
    first = int(keys.number("max_window_layers"))
    kinds = [SLIDING if i >= first else FULL for i in range(base.num_layers)]
    bias = keys.flag("attention_bias")
    config = windows(deepseek_v3_experts(base, keys), keys, kinds)
    return replace(config, qkv_bias=bias, out_bias=bias, qk_norm="head")


def exaone_moe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """K-EXAONE: norms of each query and key head, windows in most layers, the others without
    positions, and mixtures as in DeepSeek-V3."""
    number = base.num_layers
    every = keys.get("sliding_window_pattern")
    kinds = []
    if not isinstance(every, str):  # which stands beside `layer_types`
        kinds = [SLIDING if (i + 1) % int(every) else FULL for i in range(number)]
    config = windows(deepseek_v3_experts(base, keys), keys, kinds)
    if keys.get("sliding_window") is not None:
        config = rotates_in_windows(config)
    config = listed_mixtures(config, keys)
    stated = keys.get("is_moe_layer")
    if stated and tuple(map(bool, stated)) != config.expert_layers:
        raise ValueError(f"mlp_layer_types and is_moe_layer must agree on {number} layers")
    return replace(config, qk_norm="head")


def listed_mixtures(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Mixtures in the layers that `mlp_layer_types` marks, if it is there."""
    kinds = keys.get("mlp_layer_types")
    if kinds is None:
        return base
    if len(kinds) != base.num_layers or set(kinds) - {"dense", "sparse"}:
        raise ValueError(f"mlp_layer_types must name dense or sparse {base.num_layers}x")
    return replace(base, expert_layers=tuple(kind == "sparse" for kind in kinds))


def deepseek_v3_experts(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """After some dense layers, mixtures whose experts are chosen by sigmoid scores with a
    correction bias, from the best groups, and weighted by the scores alone, scaled, all in float32;
    with a shared expert. Layers that predict further tokens are left out."""
    keys.only("scoring_func", "sigmoid", "noaux_tc")  # dots.llm1 says the latter
    keys.only("topk_method", "noaux_tc")
    return deepseek_experts(base, keys, deepseek_v3_routing(keys))


def deepseek_v3_routing(keys: Keys) -> Routing:
    groups, kept = keys.size("n_group", 1), keys.size("topk_group", 1)
    return Routing(
        scores="sigmoid",
        num_groups=groups,
        kept_groups=kept,
        least_sum=1e-20,
        scale=keys.number("routed_scaling_factor", 1.0),
    )


def deepseek_experts(base: DecoderConfig, keys: Keys, routing: Routing) -> DecoderConfig:
    """After some dense layers, mixtures with a shared expert."""
    keys.only("moe_layer_freq", 1)
    keys.ignore("ep_size", "seq_aux", "aux_loss_alpha")  # of training
    first = int(keys.number("first_k_dense_replace", 0))
    width = keys.size("moe_intermediate_size")
    config = experts(base, keys, keys.size("n_routed_experts"))
    check_groups(config, routing)
    return replace(
        without_next_token_layers(config, keys),
        routing=routing,
        wide_router=True,
        expert_size=width,
        expert_layers=tuple(layer >= first for layer in range(base.num_layers)),
        shared_expert_size=width * int(keys.number("n_shared_experts", 1)),
    )


def without_next_token_layers(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Without the layers after the last one that checkpoints have for predictions of further
    tokens (MTP); their weights are not read."""
    number = keys.get("num_nextn_predict_layers") or keys.get("num_mtp_layers") or 0
    keys.ignore("num_mtp_layers")
    layers = range(base.num_layers, base.num_layers + int(number))
    prefixes = tuple((base.names.layer.format(layer), None) for layer in layers)
    stored_prefixes = base.names.stored_prefixes + prefixes
    return replace(base, names=replace(base.names, stored_prefixes=stored_prefixes))


def check_groups(config: DecoderConfig, routing: Routing) -> None:
    size, rest = divmod(config.num_experts, routing.num_groups)
    kept = routing.kept_groups
    if rest or size < routing.best_of_group or kept > routing.num_groups:
        raise ValueError(
            f"n_group {routing.num_groups}, topk_group {kept} do not fit {config.num_experts} "
            "experts"
        )
    if config.experts_per_token > kept * size:
        raise ValueError(
            f"num_experts_per_tok {config.experts_per_token} is more than the experts of "
            f"topk_group {kept}"
        )


V3_NAMES = Names(
    shared_expert="mlp.shared_experts.", correction_bias="mlp.gate.e_score_correction_bias"
)
_GLM4_MOE: JsonObject = {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
}
_EXAONE_MOE = Family(
    exaone_moe,
    Names(
        shared_expert="mlp.shared_experts.",
        correction_bias="mlp.e_score_correction_bias",
        stored_prefixes=(("mtp.", None),),
    ),
    {
        "first_k_dense_replace": 1,
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 1024,
        "norm_topk_prob": True,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
)

FAMILIES: dict[str, Family] = {
    "Glm4MoeForCausalLM": Family(glm4_moe, V3_NAMES, _GLM4_MOE, rotates_part=True),
    "SolarOpenForCausalLM": Family(
        solar_open,
        V3_NAMES,
        {
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1280,
            "n_routed_experts": 128,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
        },
        rotates_part=True,
    ),
    "Dots1ForCausalLM": Family(
        dots1,
        V3_NAMES,
        {"max_position_embeddings": 2048, "max_window_layers": 62, "sliding_window": 4096},
    ),
    "ExaoneMoeForCausalLM": _EXAONE_MOE,
    "ExaoneMoEForCausalLM": _EXAONE_MOE,  # as its makers' files name it
}
