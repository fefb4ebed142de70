"""Integer-quantized weights, quantized at load or read from a GPTQ or AWQ checkpoint.

Shape suffixes: O output features, K input features, G groups of inputs sharing a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

_MAX_GROUP = 256  # what the CPU kernels' scratch memory holds


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[o, permutation[k]] = scales[o, g] * (values[o, k] - zeros[o, g]), g = k // group_size.

    values are int8 in [-128, 127] for 8 bits, [-8, 7] for 4, and zeros, in float32, whole numbers
    among them. group_size 0 means one scale per row (then G is 1 and there are no zeros); otherwise
    it is a multiple of 8 up to 256, and scales are packed as float16, which the formats store.
    permutation_K: the input order of GPTQ's "act order". Raises ValueError for anything else.
    """

    values_OK: torch.Tensor
    scales_OG: torch.Tensor
    bits: int
    group_size: int
    zeros_OG: torch.Tensor | None = None
    permutation_K: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"{self.bits}-bit weights are not supported, only 4 and 8")
        if self.group_size and (self.group_size % 8 or not 8 <= self.group_size <= _MAX_GROUP):
            raise ValueError(
                f"group size {self.group_size} is not a multiple of 8 up to {_MAX_GROUP}"
            )
        if self.group_size == 0 and self.zeros_OG is not None:
            raise ValueError("zero points need a group size")
        if self.zeros_OG is not None:
            highest = 1 << (self.bits - 1)
            if not torch.equal(self.zeros_OG.round().clamp(-highest, highest - 1), self.zeros_OG):
                raise ValueError(f"zero points are not whole numbers of {self.bits} bits")
        out_features, in_features = self.values_OK.shape
        num_groups = -(-in_features // self.group_size) if self.group_size else 1
        if self.scales_OG.shape != (out_features, num_groups):
            raise ValueError(
                f"scales are {tuple(self.scales_OG.shape)}, not {(out_features, num_groups)}"
            )

    def dequantize(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """(O, K) in `dtype`, computed in float64: the reference."""
        in_features = self.values_OK.shape[1]
        group = self.group_size or in_features
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

    def reordered(self, order: torch.Tensor) -> QuantizedWeight:
        """Output features in this order."""
        return replace(
            self,
            values_OK=self.values_OK[order],
            scales_OG=self.scales_OG[order],
            zeros_OG=None if self.zeros_OG is None else self.zeros_OG[order],
        )

    def columns(self, begin: int, end: int) -> QuantizedWeight:
        """Input features [begin, end). Raises ValueError where that would split a group or a
        permutation."""
        if self.permutation_K is not None:
            raise ValueError("inputs in act order cannot be divided among ranks")
        if self.group_size == 0:
            return replace(self, values_OK=self.values_OK[:, begin:end])
        ends_inside = end % self.group_size and end != self.values_OK.shape[1]
        if begin % self.group_size or ends_inside:
            raise ValueError(f"inputs {begin} to {end} cut a group of {self.group_size}")
        groups = slice(begin // self.group_size, -(-end // self.group_size))
        return replace(
            self,
            values_OK=self.values_OK[:, begin:end],
            scales_OG=self.scales_OG[:, groups],
            zeros_OG=None if self.zeros_OG is None else self.zeros_OG[:, groups],
        )


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Fuse layers with the same input (q, k, v or gate, up) along the output. Raises ValueError if
    they differ in bits, group size or input order."""
    first = weights[0]
    for other in weights[1:]:
        if (other.bits, other.group_size) != (first.bits, first.group_size):
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


def fake_quantize(weight_OK: torch.Tensor, quantization: str, group: int = 128) -> torch.Tensor:
    """Round each group of input features to a symmetric int8 or int4 grid with its own scale, kept
    in the weight's dtype. Raises ValueError for another quantization."""
    if quantization not in ("int8", "int4"):
        raise ValueError(f"quantization {quantization!r} is unknown; known: none, int8, int4")
    highest = 127 if quantization == "int8" else 7
    rows, columns = weight_OK.shape
    padded_OK = functional.pad(weight_OK.float(), (0, -columns % group))
    grouped_OGK = padded_OK.view(rows, -1, group)
    scale_OG1 = grouped_OGK.abs().amax(-1, keepdim=True).clamp(min=1e-12) / highest
    rounded_OGK = (grouped_OGK / scale_OG1).round().clamp(-highest - 1, highest) * scale_OG1
    return rounded_OGK.view(rows, -1)[:, :columns].to(weight_OK.dtype)
