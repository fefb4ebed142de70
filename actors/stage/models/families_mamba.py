"""Models of Mamba-2 layers, with attention in some others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actors.stage.models.config import DecoderConfig, Mamba2
from actors.stage.models.family import FULL
from actors.stage.models.keys import Keys

MAMBA_2 = "mamba"
# Names of kinds of layers since 2026, and before.
_KINDS = {"linear_attention": MAMBA_2, MAMBA_2: MAMBA_2, FULL: FULL, "attention": FULL}


def mamba2_by_width(base: DecoderConfig, keys: Keys, kinds: Sequence[str]) -> DecoderConfig:
    """Mamba-2 in the layers that kinds marks, whose values are `mamba_expand` times as wide as the
    hidden state, and attention in the others."""
    if len(kinds) != base.num_layers or set(kinds) - set(_KINDS):
        raise ValueError(f"kinds of layers must be {' or '.join(_KINDS)} {base.num_layers}x")
    layers = tuple(_KINDS[kind] == MAMBA_2 for kind in kinds)
    keys.ignore(*(key for key in keys.values if key.startswith("mamba_")), "time_step_limit")
    # Of how weights are initialized.
    keys.ignore("time_step_max", "time_step_min", "time_step_floor")
    if not any(layers):
        return base
    width = keys.size("mamba_expand", 2) * base.hidden_size
    heads, head_dim = keys.size("mamba_n_heads", 128), keys.get("mamba_d_head", "auto")
    head_dim = width // heads if head_dim == "auto" else keys.size("mamba_d_head")
    if head_dim * heads != width:
        raise ValueError(f"mamba_n_heads {heads} of {head_dim} features are not {width}")
    return with_mamba2(base, keys, layers, head_dim)


def with_mamba2(
    base: DecoderConfig, keys: Keys, layers: tuple[bool, ...], head_dim: int
) -> DecoderConfig:
    """Mamba-2 in these layers."""
    keys.only("hidden_act", "silu", "swish")  # also that of the convolutions
    heads, groups = keys.size("mamba_n_heads", 128), keys.size("mamba_n_groups", 1)
    if heads % groups:
        raise ValueError(f"{heads} heads of Mamba-2 are no multiple of {groups} groups")
    mixer = Mamba2(
        taps=keys.size("mamba_d_conv", 4),
        num_groups=groups,
        num_heads=heads,
        state_dim=keys.size("mamba_d_state", 256),
        head_dim=head_dim,
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
