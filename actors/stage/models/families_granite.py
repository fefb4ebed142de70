"""Granite with mixtures of experts, alone or beside a shared one, and Granite 4."""

from __future__ import annotations

from dataclasses import replace

from actors.stage.models.config import DecoderConfig
from actors.stage.models.families_llama import granite
from actors.stage.models.families_mamba import MAMBA_2, mamba2_by_width
from actors.stage.models.family import Family, experts, without_positions
from actors.stage.models.keys import JsonObject, Keys
from actors.stage.models.names import MAMBA, Names, StackedNames


def granite_moe(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Granite with a mixture of experts in every layer."""
    config = experts(granite(base, keys), keys, keys.size("num_local_experts", 8))
    return replace(config, expert_size=base.inner_size, normalizes_expert_weights=True)


def granite_moe_shared(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """GraniteMoe with a shared expert beside the others, if it says so."""
    config = granite_moe(base, keys)
    return replace(config, shared_expert_size=int(keys.number("shared_intermediate_size", 0)))


def granite_moe_hybrid(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Granite 4: attention in all layers, or Mamba-2 in most. Its shared expert stands beside the
    others, or is the only MLP."""
    kinds = keys.get("layer_types") or keys.get("layers_block_type")
    base = mamba2_by_width(base, keys, kinds or [MAMBA_2] * base.num_layers)
    keys.only("mlp_bias", False)
    keys.only("normalization_function", "rmsnorm")
    keys.only("position_embedding_type", None, "nope", "rope")
    keys.ignore("init_method")
    size = keys.size("shared_intermediate_size", 1024)
    if keys.get("num_local_experts"):
        config = replace(granite_moe(base, keys), shared_expert_size=size)
    else:
        names = replace(
            base.names,
            gate=None,
            gate_up="shared_mlp.input_linear",
            down="shared_mlp.output_linear",
            shared_expert=None,
            stacked=None,
        )
        keys.ignore("num_experts_per_tok")
        config = replace(granite(base, keys), names=names, inner_size=size)
    if keys.get("position_embedding_type") != "rope":
        return without_positions(config)
    return config


_NAMES = Names(
    mixer=MAMBA,
    router="block_sparse_moe.router.layer",
    stacked=StackedNames(
        "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"
    ),
)
_SHARED = replace(
    _NAMES,
    shared_expert="shared_mlp.",
    shared_gate_up="input_linear",
    shared_down="output_linear",
)
_DEFAULTS: JsonObject = {"max_position_embeddings": 2048, "num_experts_per_tok": 2}

FAMILIES: dict[str, Family] = {
    "GraniteMoeForCausalLM": Family(granite_moe, _NAMES, _DEFAULTS),
    "GraniteMoeSharedForCausalLM": Family(granite_moe_shared, _SHARED, _DEFAULTS),
    "GraniteMoeHybridForCausalLM": Family(
        granite_moe_hybrid, _SHARED, {**_DEFAULTS, "num_local_experts": 8}
    ),
}
