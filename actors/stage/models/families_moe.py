"""Mixtures of experts in some layers, by other scores than a softmax, or beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from actors.stage.models.config import DecoderConfig
from actors.stage.models.families_llama import QWEN, qwen2, qwen3
from actors.stage.models.family import Family, experts
from actors.stage.models.keys import JsonObject, Keys
from actors.stage.models.names import Names
from actors.stage.models.rope import read_rope
from kernels.layer_form import Routing


def qwen2_moe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Qwen2 with a mixture of experts in all layers, or every few, beside a shared expert of its
    own size, which is scaled by a sigmoid of the token. Qwen1.5-MoE is one."""
    bias = keys.flag("qkv_bias", True)
    config = replace(_some_experts(qwen2(base, keys), keys, 60), qkv_bias=bias)
    return replace(config, shared_expert_size=keys.size("shared_expert_intermediate_size"))


def qwen3_moe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Qwen3 with a mixture of experts in all layers, or every few."""
    return _some_experts(qwen3(base, keys), keys, 128)


def _some_experts(base: DecoderConfig, keys: Keys, number: int) -> DecoderConfig:
    keys.only("use_sliding_window", False)
    every, plain = keys.size("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    number = keys.get("num_experts") or keys.size("num_local_experts", number)
    layers = [(i + 1) % every == 0 and i not in plain for i in range(base.num_layers)]
    return replace(
        experts(base, keys, number),
        expert_size=keys.size("moe_intermediate_size"),
        expert_layers=tuple(layers),
    )


def glm4_moe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """GLM-4.5, 4.6, 4.7 and Air: half of each head is rotated, its halves against each other; some
    norm q and k. Mixtures as in DeepSeek-V3."""
    config = deepseek_v3_experts(base, keys)
    qk_norm = "head" if keys.flag("use_qk_norm") else "none"
    return replace(config, qkv_bias=keys.flag("attention_bias"), qk_norm=qk_norm)


def minimax_m2(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """MiniMax-M2: norms of all of q and of all of k, half of each head rotated, and a mixture in
    every layer, whose experts are chosen by sigmoid scores with a correction bias."""
    if any(kind != 1 for kind in keys.get("attn_type_list", [])):
        raise ValueError("attn_type_list: only layers of kind 1, full attention, are supported")
    keys.only("use_qk_norm", True)
    keys.only("qk_norm_type", "per_layer")
    keys.only("scoring_func", "sigmoid")
    keys.only("use_routing_bias", True)
    keys.only("shared_intermediate_size", 0)
    keys.only("swa_rope_theta", -1.0)
    # Of models with other layers.
    keys.ignore("max_model_len", "mlp_intermediate_size", "shared_moe_mode", "use_grouped_topk")
    keys.ignore("mtp_transformer_layers", "num_mtp_modules", "use_mtp")
    config = experts(base, keys, keys.size("num_local_experts", 256))
    ropes = base.ropes
    if (rotated := keys.get("rotary_dim")) is not None:
        part = keys.get("partial_rotary_factor") or int(rotated) / base.head_dim
        given = {**keys.values, "partial_rotary_factor": part}
        rope = read_rope(given, base.head_dim, base.max_positions)
        ropes = (rope,) * base.num_layers
    return replace(
        config,
        ropes=ropes,
        qk_norm="whole",
        expert_size=base.inner_size,
        normalizes_expert_weights=True,
        routing=Routing("sigmoid"),
        wide_router=True,
    )


def ernie4_5_moe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """ERNIE 4.5: pairs of neighbors are rotated, and most layers have a mixture beside a shared
    expert; a correction bias helps to choose experts by their softmax."""
    keys.only("use_bias", False)
    keys.only("moe_use_aux_free", True)
    keys.ignore("moe_capacity", "moe_gate", "num_nextn_predict_layers")
    first, every = int(keys.number("moe_layer_start_index", 1)), keys.size("moe_layer_interval", 1)
    last = int(keys.number("moe_layer_end_index", -1))
    if last == -1:
        last = base.num_layers - 1
    width = keys.size("moe_intermediate_size")
    return replace(
        experts(base, keys, keys.size("moe_num_experts")),
        ropes=tuple(replace(rope, interleaved=True) for rope in base.ropes),
        expert_size=width,
        expert_layers=tuple(
            (layer + 1) % every == 0 and first <= layer <= last for layer in range(base.num_layers)
        ),
        normalizes_expert_weights=True,
        routing=Routing(least_sum=keys.number("moe_norm_min", 1e-12)),
        wide_router=True,
        shared_expert_size=width * int(keys.number("moe_num_shared_experts", 2)),
    )


def deepseek_v3_experts(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """After some dense layers, mixtures whose experts are chosen by sigmoid scores with a
    correction bias, from the best groups, and weighted by the scores alone, scaled; with a shared
    expert. Layers that predict further tokens are left out."""
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    groups, kept = keys.size("n_group", 1), keys.size("topk_group", 1)
    routing = Routing(
        scores="sigmoid",
        num_groups=groups,
        kept_groups=kept,
        least_sum=1e-20,
        scale=keys.number("routed_scaling_factor", 1.0),
    )
    return deepseek_experts(base, keys, routing)


def deepseek_experts(base: DecoderConfig, keys: Keys, routing: Routing) -> DecoderConfig:
    """After some dense layers, mixtures with a shared expert."""
    keys.only("moe_layer_freq", 1)
    keys.ignore("ep_size", "seq_aux", "aux_loss_alpha")  # of training
    first = int(keys.number("first_k_dense_replace", 0))
    width = keys.size("moe_intermediate_size")
    config = experts(base, keys, keys.size("n_routed_experts"))
    _check_groups(config, routing)
    return replace(
        without_next_token_layers(config, keys),
        routing=routing,
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


def _check_groups(config: DecoderConfig, routing: Routing) -> None:
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


DEEPSEEK_V3 = Names(
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

FAMILIES: dict[str, Family] = {
    "Qwen2MoeForCausalLM": Family(
        qwen2_moe,
        Names(shared_expert="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate"),
        {
            **QWEN,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 16,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        qwen3_moe, defaults={**QWEN, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
    ),
    "Glm4MoeForCausalLM": Family(glm4_moe, DEEPSEEK_V3, _GLM4_MOE, rotates_part=True),
    "MiniMaxM2ForCausalLM": Family(
        minimax_m2,
        Names(
            router="block_sparse_moe.gate",
            correction_bias="block_sparse_moe.e_score_correction_bias",
            expert="block_sparse_moe.experts.{}.",
            expert_gate="w1",
            expert_up="w3",
            expert_down="w2",
        ),
        {
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "rope_theta": 5_000_000.0,
        },
        rotates_part=True,
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        ernie4_5_moe,
        Names(
            shared_expert="mlp.shared_experts.",
            correction_bias="mlp.moe_statics.e_score_correction_bias",
            correction_bias_row=True,
            stored_prefixes=(("model.mtp_", None),),
        ),
        {
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
        {"num_experts_per_tok": "moe_k", "num_local_experts": "moe_num_experts"},
    ),
}
