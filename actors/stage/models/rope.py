"""Rotary position embedding and its extensions.

Each kind turns the head dimension into inverse frequencies and an attention factor:
default (Su et al., RoFormer, 2021), linear (position interpolation, Chen et al. 2023), dynamic
(NTK-aware, base grown with the length), yarn (Peng et al. 2023), longrope (Ding et al. 2024),
llama3 (Llama 3.1) and proportional (Gemma 4). The stage keeps cos and sin of every position in one
float32 table.

dynamic and longrope depend on the length of the sequence. Row p of the table is made for a
sequence of p + 1 tokens, so a token's rotation depends on its position alone: whatever the chunk
sizes, a replay gives the same keys. transformers computes the same when it generates token by token
from a prompt within the trained length to beyond it.

Kernels implement one rotation: feature i with i + D/2, by a table as wide as the head. Models that
pair neighbors, or rotate only a part of each head or nothing, are reduced to it by angles of zero
in the table and by reordering the features of q and k (`feature_order`), which does not change
their products.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actors.stage.models.keys import is_neutral

if TYPE_CHECKING:
    import torch  # within functions: who only reads configs need not wait for it

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
# Parameters that some kind reads, here as in transformers, and one that changes nothing.
_PARAMETERS = frozenset((
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor",
    "low_freq_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings",
    "partial_rotary_factor", "rope_theta", "rope_type", "short_factor", "truncate", "type",
    "finetuned",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rope:
    """One layer's rotation; lengths in tokens. Fields a kind does not use keep their default.

    dim: number of rotated features, the first of each head; 0 for kind "none".
    interleaved: pairs are neighbors, not one feature of each half.
    num_turning: proportional: of the pairs, the first; the others have an angle of zero.
    """

    kind: str
    dim: int
    theta: float
    max_positions: int
    factor: float = 1.0
    original_positions: int = 0
    attention_factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    interleaved: bool = False
    num_turning: int = 0

    @property
    def reach(self) -> int:
        """Number of positions covered. Configs of linear and dynamic scaling state the length
        before scaling, those of yarn either one, the others the length after scaling."""
        if self.kind in ("linear", "dynamic"):
            return int(self.max_positions * self.factor)
        if self.kind == "yarn":
            return max(self.max_positions, int(self.original_positions * self.factor))
        return self.max_positions


def no_rope(max_positions: int) -> Rope:
    """The rotation of a layer without positions."""
    return Rope("none", 0, 1.0, max_positions)


def read_rope(
    config: Mapping[str, Any], head_dim: int, max_positions: int, layer_type: str | None = None
) -> Rope:
    """The rotation of a config.json: `rope_parameters`, or the older `rope_scaling` with
    `rope_theta`, which replaces it. layer_type: selects the parameters in families in which they
    differ between layers. Raises ValueError for an unknown kind or a missing parameter."""
    given = _given(config, layer_type)
    kind = given.get("rope_type") or "default"
    if "short_factor" in given:  # Phi-3 once called it "su", and "yarn"
        kind = "longrope"
    if kind == "mrope":  # a text has one position on each of its three axes
        kind = "default"
    if kind not in KINDS:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    part = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if kind == "proportional":
        factor, number = _factor(kind, {"factor": 1.0, **given}, 1.0), int(part * head_dim // 2)
        return Rope(kind, head_dim, theta, max_positions, factor, num_turning=number)
    dim = int(head_dim * float(part))
    if dim % 2 or not 0 < dim <= head_dim:
        raise ValueError(f"partial_rotary_factor {part} rotates {dim} features of {head_dim}")
    length = "original_max_position_embeddings"
    # That of the whole config goes before, as in transformers; not where layers differ.
    outer = config.get(length) if layer_type is None else None
    original = int(outer or given.get(length) or max_positions)
    if kind == "default":
        return Rope(kind, dim, theta, max_positions)
    factor = _factor(kind, given, max_positions / original)
    if kind == "linear":
        return Rope(kind, dim, theta, max_positions, factor, original)
    if kind == "dynamic":
        return Rope(kind, dim, theta, max_positions, factor, max_positions)
    if kind == "llama3":
        low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
        return Rope(kind, dim, theta, max_positions, factor, original, 1.0, low, high)
    if kind == "yarn":
        return Rope(
            kind, dim, theta, max_positions, factor, original, _yarn_attention(given, factor),
            beta_fast=float(given.get("beta_fast") or 32),
            beta_slow=float(given.get("beta_slow") or 1),
            truncate=bool(given.get("truncate", True)),
        )  # fmt: skip
    short, long = tuple(given["short_factor"]), tuple(given["long_factor"])
    if len(short) != dim // 2 or len(long) != dim // 2:
        raise ValueError(f"longrope needs {dim // 2} short and long factors")
    attention = given.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(
        kind, dim, theta, max_positions, factor, original, float(attention),
        short_factors=short, long_factors=long,
    )  # fmt: skip


def _factor(kind: str, given: Mapping[str, Any], ratio: float) -> float:
    """How often the trained length fits in the whole; the ratio of the two for longrope without it,
    and for yarn whose factor is null."""
    value = given.get("factor")
    if value is None and (kind == "longrope" or (kind == "yarn" and "factor" in given)):
        value = ratio
    if value is None:
        raise ValueError(f"rope type {kind!r} needs a factor")
    if not (math.isfinite(factor := float(value)) and factor > 0):
        raise ValueError(f"rope type {kind!r}: factor must be positive, not {value}")
    return factor


def _given(config: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """The parameters that hold, their kind as `rope_type`. `rope_scaling` replaces all others but
    the base and the rotated part; where layers differ, it replaces what it names, of the full
    attention's."""
    parameters = dict(config.get("rope_parameters") or {})
    if layer_type is not None:
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind != "default":
            raise ValueError(f"rope_parameters of {kind!r} must be by layer type")
        parameters = dict(parameters.get(layer_type) or {})
    scaling = dict(config.get("rope_scaling") or {})
    for name, given in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if any(isinstance(value, dict) for value in given.values()):
            raise ValueError(f"{name} that differ between layers are not supported")
        older = given.pop("type", None)
        if kind := given.get("rope_type") or older:
            given["rope_type"] = kind
    if not scaling:
        return parameters
    if layer_type is not None:
        return {**parameters, **scaling}
    if "rope_type" not in scaling and parameters.get("rope_type", "default") != "default":
        kind = parameters["rope_type"]
        raise ValueError(f"rope_scaling names no rope_type, and rope_parameters names {kind!r}")
    kept = ("rope_theta", "partial_rotary_factor")
    return {**{name: parameters[name] for name in kept if name in parameters}, **scaling}


def unread_parameters(config: Mapping[str, Any], read: Collection[str] = ()) -> dict[str, Any]:
    """Parameters of the rotation that neither a kind nor the family reads ("rope_parameters.name"),
    and their values."""
    unread = {}
    for key in ("rope_parameters", "rope_scaling"):
        given = config.get(key) or {}
        by_layer_type = [value for value in given.values() if isinstance(value, dict)]
        for name, value in (item for part in by_layer_type or [given] for item in part.items()):
            if name not in _PARAMETERS and name not in read and not is_neutral(name, value):
                unread[f"{key}.{name}"] = value
    return unread


def cos_sin_table(rope: Rope, num_positions: int, head_dim: int) -> torch.Tensor:
    """(num_positions, head_dim) float32: cos in the first half of a row, sin in the second.
    Features that are not rotated have an angle of zero."""
    import torch

    cos_PF = torch.ones(num_positions, head_dim // 2)
    sin_PF = torch.zeros(num_positions, head_dim // 2)
    if rope.dim:
        positions_P = torch.arange(num_positions, dtype=torch.float32)
        angles_PF = positions_P[:, None] * _inverse_frequencies(rope, num_positions)
        cos_PF[:, : rope.dim // 2] = angles_PF.cos() * rope.attention_factor
        sin_PF[:, : rope.dim // 2] = angles_PF.sin() * rope.attention_factor
    return torch.cat((cos_PF, sin_PF), dim=-1)


def feature_order(ropes: Iterable[Rope], head_dim: int) -> torch.Tensor | None:
    """(D,) index in the model's head of each feature here, so that i pairs with i + D/2; None if
    the model's order is the same. Layers without rotation use the order of the others."""
    import torch

    rotated = {(rope.dim, rope.interleaved) for rope in ropes if rope.dim}
    if len(rotated) > 1:
        raise ValueError("layers that rotate different features are not supported")
    dim, interleaved = rotated.pop() if rotated else (head_dim, False)
    if dim == head_dim and not interleaved:
        return None
    features = torch.arange(dim).view(-1, 2).T if interleaved else torch.arange(dim).view(2, -1)
    rest = torch.arange(dim, head_dim).view(2, -1)
    return torch.cat((features, rest), dim=1).flatten()


def _inverse_frequencies(rope: Rope, num_positions: int) -> torch.Tensor:
    """(dim / 2) frequencies, or (num_positions, dim / 2) if they depend on the length."""
    import torch

    exponents_F = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    plain_F = 1.0 / (rope.theta**exponents_F)
    match rope.kind:
        case "linear":
            return plain_F / rope.factor
        case "proportional":
            turns_F = torch.arange(rope.dim // 2) < rope.num_turning
            return torch.where(turns_F, plain_F / rope.factor, 0.0)
        case "dynamic":
            return _dynamic(rope, exponents_F, num_positions)
        case "llama3":
            return _llama3(rope, plain_F)
        case "yarn":
            return _yarn(rope, exponents_F)
        case "longrope":
            lengths_P = torch.arange(1, num_positions + 1)
            factors_PF = torch.where(
                lengths_P[:, None] > rope.original_positions,
                torch.tensor(rope.long_factors, dtype=torch.float32),
                torch.tensor(rope.short_factors, dtype=torch.float32),
            )
            return 1.0 / (factors_PF * rope.theta**exponents_F)
        case _:
            return plain_F


def _dynamic(rope: Rope, exponents_F: torch.Tensor, num_positions: int) -> torch.Tensor:
    import torch

    lengths_P = torch.arange(1, num_positions + 1).clamp(min=rope.original_positions)
    growth_P = rope.factor * lengths_P / rope.original_positions - (rope.factor - 1)
    bases_P = rope.theta * growth_P ** (rope.dim / (rope.dim - 2))
    return 1.0 / (bases_P[:, None] ** exponents_F)


def _llama3(rope: Rope, plain_F: torch.Tensor) -> torch.Tensor:
    """Low frequencies are divided by the factor, high ones kept, those between blended."""
    wavelengths_F = 2 * math.pi / plain_F
    cycles_F = rope.original_positions / wavelengths_F
    span = rope.high_frequency_factor - rope.low_frequency_factor
    kept_F = ((cycles_F - rope.low_frequency_factor) / span).clamp(0.0, 1.0)
    return kept_F * plain_F + (1.0 - kept_F) * plain_F / rope.factor


def _yarn(rope: Rope, exponents_F: torch.Tensor) -> torch.Tensor:
    """Frequencies with many turns over the trained length are kept, low ones interpolated."""

    import torch

    def feature_of(num_turns: float) -> float:
        turns = rope.original_positions / (num_turns * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = feature_of(rope.beta_fast), feature_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = (high - low) or 0.001
    features_F = torch.arange(rope.dim // 2, dtype=torch.float32)
    kept_F = 1 - ((features_F - low) / span).clamp(0, 1)
    plain_F = rope.theta**exponents_F
    return (1.0 / (rope.factor * plain_F)) * (1 - kept_F) + (1.0 / plain_F) * kept_F


def score_factor(config: Mapping[str, Any]) -> float:
    """By which families with latent attention multiply scores, where rotations are scaled."""
    given = _given(config, None)
    weight = given.get("mscale_all_dim")
    if not weight or (given.get("rope_type") or "default") == "default":
        return 1.0
    return _magnitude(float(weight), float(given["factor"])) ** 2


def _magnitude(weight: float, factor: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention(given: dict[str, Any], factor: float) -> float:
    explicit = given.get("attention_factor")
    if explicit is not None:
        return float(explicit)

    weight, weight_all = given.get("mscale"), given.get("mscale_all_dim")
    if weight and weight_all:
        return _magnitude(float(weight), factor) / _magnitude(float(weight_all), factor)
    return _magnitude(1.0, factor)
