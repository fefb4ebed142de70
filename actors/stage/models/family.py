"""A model family: its differences from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actors.stage.models.alibi import Alibi
from actors.stage.models.config import DecoderConfig
from actors.stage.models.keys import JsonObject, Keys
from actors.stage.models.names import LLAMA, Names
from actors.stage.models.rope import no_rope

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    describe: completes the description from the shared part, already read, and the keys of
        config.json.
    defaults: values of keys that config.json may omit.
    renamed: the family's names of keys that Llama has too.
    ropes_by_layer_type: `rope_parameters` are grouped by layer type ("full_attention", ...).
    rotates_part: `partial_rotary_factor` counts; other families' implementations ignore it.
    inner: key of the decoder's part of config.json, for models with other parts too.
    """

    describe: Callable[[DecoderConfig, Keys], DecoderConfig]
    names: Names = LLAMA
    defaults: JsonObject = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    ropes_by_layer_type: bool = False
    rotates_part: bool = False
    inner: str = ""


def windows(base: DecoderConfig, keys: Keys, kinds: Sequence[str]) -> DecoderConfig:
    """`sliding_window` in the layers that `layer_types`, or else `kinds`, marks as sliding."""
    kinds = keys.get("layer_types", kinds)
    if len(kinds) != base.num_layers or set(kinds) - {SLIDING, FULL}:
        raise ValueError(f"layer_types must name {SLIDING} or {FULL} {base.num_layers}x")
    window = keys.get("sliding_window")
    windows = [int(window) if k == SLIDING and window is not None else None for k in kinds]
    return replace(base, sliding_windows=tuple(windows))


def in_units(base: DecoderConfig, multiplier: float) -> DecoderConfig:
    """A residual multiplier r: x + r f(norm(x)) equals a residual kept in units of r,
    x / r + f(norm(x / r)), because a norm is invariant to scale except for its epsilon."""
    scale, eps = base.embedding_scale / multiplier, base.norm_eps / multiplier**2
    return replace(base, embedding_scale=scale, norm_eps=eps)


def experts(base: DecoderConfig, keys: Keys, number: int) -> DecoderConfig:
    """A mixture of so many experts in every layer."""
    keys.ignore("num_experts", "num_local_experts")
    return replace(
        base,
        num_experts=number,
        experts_per_token=keys.size("num_experts_per_tok"),
        normalizes_expert_weights=keys.flag("norm_topk_prob"),
        expert_layers=(True,) * base.num_layers,
    )


def with_alibi(base: DecoderConfig, alibi: Alibi) -> DecoderConfig:
    """ALiBi in place of the rotation, in every layer."""
    return replace(base, alibi=alibi, ropes=(no_rope(base.max_positions),) * base.num_layers)
