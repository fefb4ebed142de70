"""Weights of integers or e4m3 with scales, quantized at load or read from a checkpoint.

Shape suffixes: O output features, K input features, G groups of inputs sharing a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.nn import functional

# Scales of x rounded to 8 bits: "token", one for each row; "group", one for each row and group of
# inputs; "none": x is not rounded.
InputRounding = Literal["none", "group", "token"]
ROUNDING = ("w8a8", "w4a8")  # quantizations of weights that round inputs
FLOAT8_ROUNDING = "fp8_w8a8"  # the same in e4m3
FLOAT8 = torch.float8_e4m3fn
MAX_GROUP = 256  # what the CPU kernels' scratch memory holds
_BLOCK_BYTES = 64 << 20  # in float32: large enough to fill a GPU


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[o, permutation[k]] = scales[o, g] * (values[o, k] - zeros[o, g]), g = k // group_size.

    values are int8 in [-128, 127] for 8 bits, [-8, 7] for 4, and zeros, in float32, whole numbers
    among them; or e4m3, 8 bits without zeros. group_size 0 means one scale per row (then G is 1 and
    there are no zeros); otherwise it is a multiple of 8 up to 256, and scales of integers are
    packed as float16, which the formats store. permutation_K: the input order of GPTQ's "act
    order". input_rounding: of x to 8 bits before it is multiplied (see `round_inputs`). Raises
    ValueError for anything else.
    """

    values_OK: torch.Tensor
    scales_OG: torch.Tensor
    bits: int
    group_size: int
    zeros_OG: torch.Tensor | None = None
    permutation_K: torch.Tensor | None = None
    input_rounding: InputRounding = "none"

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"{self.bits}-bit weights are not supported, only 4 and 8")
        if self.group_size and (self.group_size % 8 or not 8 <= self.group_size <= MAX_GROUP):
            raise ValueError(
                f"group size {self.group_size} is not a multiple of 8 up to {MAX_GROUP}"
            )
        if self.group_size == 0 and self.zeros_OG is not None:
            raise ValueError("zero points need a group size")
        if self.values_OK.dtype == FLOAT8 and (self.bits != 8 or self.zeros_OG is not None):
            raise ValueError("e4m3 has 8 bits and no zero points")
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

    def round_inputs(self, x_TK: torch.Tensor) -> torch.Tensor:
        """x as it is multiplied, in float32: the reference. Rounded values are whole numbers of 8
        bits times a scale, which is the largest magnitude over 127.5, or numbers of e4m3 by the
        largest over 448. Groups are the weight's or, if it has none, the widest that divides the
        inputs of 512, 576, 384, 256, 192, 128, else 64.
        """
        if self.input_rounding == "none":
            return x_TK.float()
        in_features = x_TK.shape[1]
        widths = (512, 576, 384, 256, 192, 128)
        group = self.group_size or next((g for g in widths if in_features % g == 0), 64)
        if self.input_rounding == "token":
            group = max(1, in_features)
        order_K = torch.arange(in_features) if self.permutation_K is None else self.permutation_K
        wide_TK = functional.pad(x_TK[:, order_K.long()].float(), (0, -in_features % group))
        wide_TGk = wide_TK.view(len(x_TK), -1, group)
        is_float8 = self.values_OK.dtype == FLOAT8
        scale_TG1 = wide_TGk.abs().amax(-1, keepdim=True) / (448 if is_float8 else 127.5)
        scaled_TGk = wide_TGk * torch.where(scale_TG1 == 0, 0.0, 1.0 / scale_TG1)
        if is_float8:
            codes_TGk = scaled_TGk.clamp(-448, 448).to(FLOAT8).float()
        else:
            codes_TGk = scaled_TGk.round().clamp(-128, 127)
        rounded_TGk = codes_TGk * scale_TG1
        rounded_TK = torch.empty_like(x_TK, dtype=torch.float32)
        rounded_TK[:, order_K.long()] = rounded_TGk.flatten(1)[:, :in_features]
        return rounded_TK

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
        if _form(other) != _form(first):
            raise ValueError("layers of different bits, groups or rounding cannot be fused")
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


def _form(weight: QuantizedWeight) -> tuple[torch.dtype, int, int, str]:
    return weight.values_OK.dtype, weight.bits, weight.group_size, weight.input_rounding


def row_blocks(weight_OK: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Consecutive rows of a weight. Quantized block by block, one that fills most of a GPU's memory
    needs little beside itself and its codes."""
    rows, columns = weight_OK.shape
    step = max(1, _BLOCK_BYTES // (4 * max(1, columns)))
    for begin in range(0, rows, step):
        block = slice(begin, begin + step)
        yield block, weight_OK[block]


def quantize_rows(weight_OK: torch.Tensor, quantization: str) -> QuantizedWeight:
    """Round to int8 ("w8a8") or e4m3 ("fp8_w8a8"), symmetric about 0, with a scale for each output
    and, for inputs, one for each token. Raises ValueError for another quantization."""
    if quantization not in ("w8a8", FLOAT8_ROUNDING):
        raise ValueError(f"quantization {quantization!r} has no scale for each output")
    highest, dtype = (127, torch.int8) if quantization == "w8a8" else (448, FLOAT8)
    values_OK = weight_OK.new_empty(weight_OK.shape, dtype=dtype)
    scales_O1 = weight_OK.new_empty((len(weight_OK), 1), dtype=torch.float32)
    for block, part_OK in row_blocks(weight_OK):
        wide_OK = part_OK.float()
        scale_O1 = wide_OK.abs().amax(1, keepdim=True).clamp(min=1e-12) / highest
        scaled_OK = (wide_OK / scale_O1).clamp(-highest, highest)
        scales_O1[block] = scale_O1
        values_OK[block] = (scaled_OK.round() if dtype == torch.int8 else scaled_OK).to(dtype)
    return QuantizedWeight(values_OK, scales_O1, 8, 0, input_rounding="token")


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
