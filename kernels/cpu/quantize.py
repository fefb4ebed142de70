"""Whole-number weights, made from floating point at load.

GPTQ and AWQ checkpoints (gptq_awq.py) end as the same `QuantizedWeight`, which the C++ library
packs (linear.py) and other backends may turn back into floating point.

Shape suffixes: O output features, K input features, G groups of inputs sharing a scale.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.cpu import library

GROUP_SIZES = (32, 64, 128)
_MAX_GROUP = 256  # what the kernels' scratch memory holds
_DEFAULT_INT4_GROUP = 32
# Fractions of the largest magnitude tried as the clipping point of a group.
_CLIPS = tuple(1.0 - 0.04 * step for step in range(8))
# Element types by their number in the C++ library.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[o, permutation[k]] = scales[o, g] * (values[o, k] - zeros[o, g]), g = k // group.

    values are int8 in [-128, 127] for 8 bits, [-8, 7] for 4. group 0 means one scale per row (then
    G is 1 and there are no zeros); otherwise it is a multiple of 8 up to 256 and scales are exact
    in float16.
    """

    values_OK: torch.Tensor
    scales_OG: torch.Tensor
    bits: int
    group: int
    zeros_OG: torch.Tensor | None = None
    permutation_K: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"{self.bits}-bit weights are not supported, only 4 and 8")
        if self.group and (self.group % 8 or not 8 <= self.group <= _MAX_GROUP):
            raise ValueError(f"group size {self.group} is not a multiple of 8 up to {_MAX_GROUP}")
        if self.group == 0 and self.zeros_OG is not None:
            raise ValueError("zero points need a group size")
        out_features, in_features = self.values_OK.shape
        num_groups = -(-in_features // self.group) if self.group else 1
        if self.scales_OG.shape != (out_features, num_groups):
            raise ValueError(
                f"scales are {tuple(self.scales_OG.shape)}, not {(out_features, num_groups)}"
            )

    def dequantize(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The weight these numbers stand for, (O, K), computed in float64: the reference."""
        in_features = self.values_OK.shape[1]
        group = self.group or in_features
        index_K = torch.arange(in_features) // max(group, 1)
        weight_OK = self.values_OK.double()
        if self.zeros_OG is not None:
            weight_OK = weight_OK - self.zeros_OG.double()[:, index_K]
        weight_OK = weight_OK * self.scales_OG.double()[:, index_K]
        if self.permutation_K is not None:
            restored = torch.empty_like(weight_OK)
            restored[:, self.permutation_K.long()] = weight_OK
            weight_OK = restored
        return weight_OK.to(dtype)

    def rows(self, begin: int, end: int) -> QuantizedWeight:
        """Output features [begin, end)."""
        return replace(
            self,
            values_OK=self.values_OK[begin:end],
            scales_OG=self.scales_OG[begin:end],
            zeros_OG=None if self.zeros_OG is None else self.zeros_OG[begin:end],
        )

    def columns(self, begin: int, end: int) -> QuantizedWeight:
        """Input features [begin, end); ValueError where that would cut a group or a permutation."""
        if self.permutation_K is not None:
            raise ValueError("inputs in act order cannot be divided among ranks")
        if self.group == 0:
            return replace(self, values_OK=self.values_OK[:, begin:end])
        ends_inside = end % self.group and end != self.values_OK.shape[1]
        if begin % self.group or ends_inside:
            raise ValueError(f"inputs {begin} to {end} cut a group of {self.group}")
        groups = slice(begin // self.group, -(-end // self.group))
        return replace(
            self,
            values_OK=self.values_OK[:, begin:end],
            scales_OG=self.scales_OG[:, groups],
            zeros_OG=None if self.zeros_OG is None else self.zeros_OG[:, groups],
        )


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Layers with the same input side by side (q, k, v or gate, up); ValueError if they differ in
    bits, group or order of inputs."""
    first = weights[0]
    for other in weights[1:]:
        if (other.bits, other.group) != (first.bits, first.group):
            raise ValueError("layers of different bits or group size cannot be fused")
        if (other.permutation_K is None) != (first.permutation_K is None) or (
            first.permutation_K is not None
            and other.permutation_K is not None
            and not torch.equal(other.permutation_K, first.permutation_K)
        ):
            raise ValueError("layers whose inputs are in different order cannot be fused")
    zeros_OG = None
    if any(weight.zeros_OG is not None for weight in weights):
        zeros_OG = torch.cat(
            [
                torch.zeros_like(weight.scales_OG) if weight.zeros_OG is None else weight.zeros_OG
                for weight in weights
            ]
        )
    return replace(
        first,
        values_OK=torch.cat([weight.values_OK for weight in weights]),
        scales_OG=torch.cat([weight.scales_OG for weight in weights]),
        zeros_OG=zeros_OG,
    )


def parse(quantization: str) -> tuple[int, int]:
    """ "int8", "int8-g64", "int4", "int4-g128" -> (bits, group); group 0 is one scale per row."""
    match = re.fullmatch(r"int([48])(?:-g(\d+))?", quantization)
    if match is None:
        raise ValueError(f'quantization must be "none", "int8[-gN]" or "int4[-gN]": {quantization}')
    bits = int(match[1])
    if match[2] is None:
        return bits, _DEFAULT_INT4_GROUP if bits == 4 else 0
    group = int(match[2])
    if group not in GROUP_SIZES:
        raise ValueError(f"group size must be one of {GROUP_SIZES}, not {group}")
    return bits, group


def quantize(weight_OK: torch.Tensor, quantization: str) -> QuantizedWeight:
    """Round to nearest, with the scale of each group (or row) that loses least in mean square.

    weight_OK: float32, bfloat16 or float16 on the CPU. Computed in C++ where the library is there,
    else by `quantize_reference`; the numbers are the same.
    """
    if library.load() is None or weight_OK.dtype not in TYPES:
        return quantize_reference(weight_OK, quantization)
    bits, group = parse(quantization)
    weight_OK = weight_OK if weight_OK.stride(1) == 1 else weight_OK.contiguous()
    out_features, in_features = weight_OK.shape
    width = group or max(in_features, 1)
    clips = torch.tensor(_clips(group))
    values_OK = torch.empty(out_features, in_features, dtype=torch.int8)
    scales_OG = torch.zeros(out_features, max(1, -(-in_features // width)))
    int64, pointer, whole = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    run = library.function(
        "legato_quantize",
        *(whole, whole, int64, int64, pointer, int64, whole, int64, whole),
        *(pointer, whole, pointer, pointer),
    )
    out_of_memory = run(
        *(TYPES[weight_OK.dtype], out_features, in_features),
        *(weight_OK.data_ptr(), weight_OK.stride(0), bits, width, int(group > 0)),
        *(clips.data_ptr(), len(clips), values_OK.data_ptr(), scales_OG.data_ptr()),
    )
    if out_of_memory:
        raise MemoryError(f"no memory to quantise a {out_features} x {in_features} weight")
    return QuantizedWeight(values_OK, scales_OG, bits, group)


def quantize_reference(weight_OK: torch.Tensor, quantization: str) -> QuantizedWeight:
    """The same in plain torch: float32 value by value, errors summed in float64."""
    bits, group = parse(quantization)
    out_features, in_features = weight_OK.shape
    width = group or max(in_features, 1)
    num_groups = max(1, -(-in_features // width))
    w_OGk = torch.zeros(out_features, num_groups * width)
    w_OGk[:, :in_features] = weight_OK.float()
    w_OGk = w_OGk.view(out_features, num_groups, width)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    # Two scales are tried at each clipping point: one (perhaps negative) that gives the range's
    # spare lowest value to the side that reaches further, and one for the range's even part.
    above_OG, below_OG = w_OGk.amax(dim=2).clamp_(min=0), (-w_OGk).amax(dim=2).clamp_(min=0)
    extreme_OG = torch.where(above_OG >= below_OG, above_OG, -below_OG)
    full_scales = (extreme_OG / low, torch.maximum(above_OG, below_OG) / high)
    best_error_OG = torch.full_like(above_OG, float("inf"), dtype=torch.float64)
    best_scale_OG = torch.zeros_like(above_OG)
    for clip in torch.tensor(_clips(group)):
        for full_scale_OG in full_scales:
            scale_OG = full_scale_OG * clip
            if group:
                scale_OG = scale_OG.half().float()
            rounded = _to_grid(w_OGk, scale_OG, low, high)
            error_OG = (rounded * scale_OG[..., None] - w_OGk).square().sum(2, dtype=torch.float64)
            better = error_OG < best_error_OG
            best_error_OG = torch.where(better, error_OG, best_error_OG)
            best_scale_OG = torch.where(better, scale_OG, best_scale_OG)
    values = _to_grid(w_OGk, best_scale_OG, low, high).to(torch.int8)
    values_OK = values.view(out_features, -1)[:, :in_features].contiguous()
    return QuantizedWeight(values_OK, best_scale_OG, bits, group)


def _to_grid(w_OGk: torch.Tensor, scale_OG: torch.Tensor, low: int, high: int) -> torch.Tensor:
    inverse_OG = torch.where(scale_OG == 0, 0.0, 1.0 / scale_OG)
    return (w_OGk * inverse_OG[..., None]).round().clamp(low, high)


def _clips(group: int) -> tuple[float, ...]:
    return _CLIPS if group else (1.0,)
