"""A model family: its differences from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actors.stage.models.alibi import Alibi
from actors.stage.models.config import DecoderConfig, Temperature
from actors.stage.models.keys import JsonObject, Keys
from actors.stage.models.names import LLAMA, Names
from actors.stage.models.rope import no_rope, read_rope

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
    rope_keys: what the family reads of its rotation beyond what all families do.
    inner: key of the decoder's part of config.json, for models with other parts too.
    may_be_flat: in older files, the decoder's keys are beside the other parts.
    kinds: families of the decoder by its `model_type`, for models with one of several; `describe`
        then completes what these describe, and `names` has only what is stored by other names.
    """

    describe: Callable[[DecoderConfig, Keys], DecoderConfig]
    names: Names = LLAMA
    defaults: JsonObject = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    ropes_by_layer_type: bool = False
    rotates_part: bool = False
    rope_keys: tuple[str, ...] = ()
    inner: str = ""
    may_be_flat: bool = False
    kinds: Mapping[str, Family] = field(default_factory=dict)

    def of_kind(self, kind: object) -> Family:
        """The family of a decoder of this `model_type`, by default the first. Raises ValueError for
        another kind."""
        if not self.kinds:
            return self
        found = self.kinds.get(str(kind or next(iter(self.kinds))))
        if found is None:
            supported = ", ".join(self.kinds)
            raise ValueError(f"{self.inner} of {kind!r} is not supported; supported: {supported}")
        return replace(
            found,
            describe=lambda base, keys: self.describe(found.describe(base, keys), keys),
            names=replace(found.names, stored_prefixes=self.names.stored_prefixes),
        )


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


def with_growing_queries(base: DecoderConfig, keys: Keys) -> DecoderConfig:
    """Queries that grow with the position beyond the trained length, in layers that are rotated:
    `llama_4_scaling_beta` of the rotation."""
    rope = keys.get("rope_parameters", {})
    slope = float(rope.get("llama_4_scaling_beta") or 0.0)
    if not slope:
        return base
    length = int(rope["original_max_position_embeddings"])
    return replace(base, temperature=Temperature(slope, length, first=0, rotated=True))


def rotates_in_windows(base: DecoderConfig) -> DecoderConfig:
    """Layers without a window have no positions (NoPE)."""
    nope = no_rope(base.max_positions)
    pairs = zip(base.ropes, base.sliding_windows, strict=True)
    return replace(base, ropes=tuple(nope if window is None else rope for rope, window in pairs))


def windows_of_own_rotation(base: DecoderConfig, keys: Keys, theta: str) -> DecoderConfig:
    """Layers with a window are rotated by their own `rope_parameters`, whose base is by default the
    value of the key theta."""
    given = (keys.get("rope_parameters") or {}).get(SLIDING) or {}
    local = read_rope(
        {"rope_theta": keys.number(theta), "rope_parameters": given},
        base.head_dim,
        base.max_positions,
    )
    pairs = zip(base.ropes, base.sliding_windows, strict=True)
    return replace(base, ropes=tuple(rope if window is None else local for rope, window in pairs))


def with_neighbors_rotated(base: DecoderConfig) -> DecoderConfig:
    """Rotations of neighboring pairs, in every layer."""
    return replace(base, ropes=tuple(replace(rope, interleaved=True) for rope in base.ropes))


def without_positions(base: DecoderConfig) -> DecoderConfig:
    """No rotation, in every layer."""
    return replace(base, ropes=(no_rope(base.max_positions),) * base.num_layers)


def with_alibi(base: DecoderConfig, alibi: Alibi) -> DecoderConfig:
    """ALiBi in place of the rotation, in every layer."""
    return replace(without_positions(base), alibi=alibi)
