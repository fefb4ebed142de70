"""Whole-number weights: made from floating point at load, or unpacked from GPTQ and AWQ folders.

Everything ends as one `QuantizedWeight`, which the C++ library packs (kernels/cpu/linear.py).

Shape suffixes: O output features, K input features, G groups of inputs sharing a scale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

GROUP_SIZES = (32, 64, 128)
_MAX_GROUP = 256  # what the kernels' scratch memory holds
_DEFAULT_INT4_GROUP = 32
# Fractions of the largest magnitude tried as the clipping point of a group.
_CLIPS = tuple(1.0 - 0.02 * step for step in range(21))
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[o, permutation[k]] = scales[o, g] * (values[o, k] - zeros[o, g]), g = k // group.

    values are int8 in [-128, 127] for 8 bits, [-8, 7] for 4. group 0 means one scale per row (then
    G is 1 and there are no zeros); otherwise it is a multiple of 8 up to 256 and scales are exact in
    float16.
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
    """Round to nearest, with the scale of each group (or row) that loses least in mean square."""
    bits, group = parse(quantization)
    parts = [_quantize_rows(rows, bits, group) for rows in weight_OK.split(_ROWS_AT_ONCE)]
    values_OK = torch.cat([values for values, _ in parts])
    scales_OG = torch.cat([scales for _, scales in parts])
    return QuantizedWeight(values_OK, scales_OG, bits, group)


def _quantize_rows(
    weight_OK: torch.Tensor, bits: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric values and scales of some rows."""
    out_features, in_features = weight_OK.shape
    width = group or in_features
    num_groups = -(-in_features // width)
    w_OGk = torch.zeros(out_features, num_groups * width)
    w_OGk[:, :in_features] = weight_OK.float()
    w_OGk = w_OGk.view(out_features, num_groups, width)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    largest_OG = w_OGk.abs().amax(dim=2)
    # The end of the range with one value more goes to the side that reaches further.
    extreme_OG = w_OGk.gather(2, w_OGk.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    best_error_OG = torch.full_like(largest_OG, float("inf"))
    best_scale_OG = torch.zeros_like(largest_OG)
    clips = _CLIPS if group else (1.0,)
    for clip in clips:
        for full_scale in (-extreme_OG / -low, largest_OG / high):
            scale_OG = full_scale * clip
            if group:
                scale_OG = scale_OG.half().float()
            inverse_OG = torch.where(scale_OG == 0, 0.0, 1.0 / scale_OG)
            rounded = (w_OGk * inverse_OG[..., None]).round_().clamp_(low, high)
            error_OG = rounded.mul_(scale_OG[..., None]).sub_(w_OGk).square_().sum(dim=2)
            better = error_OG < best_error_OG
            best_error_OG = torch.where(better, error_OG, best_error_OG)
            best_scale_OG = torch.where(better, scale_OG, best_scale_OG)
    inverse_OG = torch.where(best_scale_OG == 0, 0.0, 1.0 / best_scale_OG)
    values = (w_OGk * inverse_OG[..., None]).round_().clamp_(low, high).to(torch.int8)
    return values.view(out_features, -1)[:, :in_features].contiguous(), best_scale_OG
