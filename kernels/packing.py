"""Quantized weights as backend `torch` and the GPU backends hold them, in the layout of the Triton
kernels: quantized at load to int8, int4 or fp8, or as a checkpoint's integers came.

Weights quantized here have a scale for each group of 128 input features of one output row,
symmetric about 0; int8 and int4 use the grid of `fake_quantize`, so all backends give the same
values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from kernels.quantized import QuantizedWeight, row_blocks

GROUP = 128
QUANTIZATIONS = ("int8", "int4", "fp8")
_FLOAT8 = torch.float8_e4m3fn
# Input features that a kernel multiplies at once: either half of a group of int4 at least 16.
_NARROWEST = 32


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """weight[o, k] = scales[o, g] * (code[o, k] - zeros[o, g]), g = k // group.

    group: at most 128 input features. A group is stored as W codes, where W, a power of two, is at
    least 32; those after its features, or after the last feature, are padding.

    codes: int8 (O, G * W); for "int4" uint8 (O, G * W / 2), where byte j of a group holds feature j
        in its low half and feature j + W / 2 in its high half, each plus 8; for "fp8" e4m3 in
        uint8.
    scales: float32 or float16 (O, G).
    zeros: int8 (O, G); None: zero everywhere.
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    in_features: int
    zeros: torch.Tensor | None = None
    group: int = GROUP

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def width(self) -> int:
        """W: the codes of a group, padding included."""
        per_byte = 2 if self.kind == "int4" else 1
        return self.codes.shape[1] * per_byte // self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros

    def to(self, device: torch.device) -> PackedWeight:
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
        )

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """(O, K), computed in float32, which is exact where scales are float16: the reference of
        the kernels."""
        grouped = self.codes.view(self.out_features, self.scales.shape[1], -1)
        if self.kind == "int4":
            values = torch.cat((grouped & 15, grouped >> 4), dim=-1).float().sub_(8)
        elif self.kind == "fp8":
            values = grouped.view(_FLOAT8).float()
        else:
            values = grouped.float()
        if self.zeros is not None:
            values -= self.zeros[..., None]
        values *= self.scales[..., None]
        weight_OC = values[..., : self.group].flatten(1)
        return weight_OC[:, : self.in_features].to(dtype)


def pack_weight(weight_OK: torch.Tensor, kind: str) -> PackedWeight:
    """Quantize a weight. Raises ValueError for a kind that is not one of QUANTIZATIONS."""
    if kind not in QUANTIZATIONS:
        known = ", ".join(("none", *QUANTIZATIONS))
        raise ValueError(f"quantization {kind!r} is unknown; known: {known}")
    rows, columns = weight_OK.shape
    num_groups = -(-columns // GROUP)
    width = GROUP // 2 if kind == "int4" else GROUP
    dtype = torch.int8 if kind == "int8" else torch.uint8
    codes = weight_OK.new_empty((rows, num_groups * width), dtype=dtype)
    scales_OG = weight_OK.new_empty((rows, num_groups), dtype=torch.float32)
    for block, part_OK in row_blocks(weight_OK):
        codes[block], scales_OG[block] = _quantized(part_OK, kind)
    return PackedWeight(kind, codes, scales_OG, columns)


def _quantized(weight_OK: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of some rows."""
    rows, columns = weight_OK.shape
    padded_OC = functional.pad(weight_OK.float(), (0, -columns % GROUP))
    grouped_OGW = padded_OC.view(rows, -1, GROUP)
    highest = {"int8": 127.0, "int4": 7.0, "fp8": torch.finfo(_FLOAT8).max}[kind]
    scale_OG1 = grouped_OGW.abs().amax(-1, keepdim=True).clamp(min=1e-12) / highest
    scaled_OGW = grouped_OGW / scale_OG1
    if kind == "fp8":
        codes = scaled_OGW.to(_FLOAT8).view(torch.uint8).flatten(1)
    else:
        codes = _codes(scaled_OGW.round().clamp(-highest - 1, highest).to(torch.int8), kind)
    return codes, scale_OG1.squeeze(-1)


def pack_quantized(weight: QuantizedWeight) -> PackedWeight:
    """The same numbers, input features in the order in which `weight` stores them: feature k is the
    input permutation_K[k]."""
    rows, columns = weight.values_OK.shape
    group = weight.group_size or GROUP
    while group > GROUP:
        group //= 2
    width = max(_NARROWEST, 1 << (group - 1).bit_length())
    first_G = torch.arange(0, columns, group)
    index_G = first_G // weight.group_size if weight.group_size else torch.zeros_like(first_G)
    padded_OC = functional.pad(weight.values_OK, (0, -columns % group))
    values_OGW = functional.pad(padded_OC.view(rows, -1, group), (0, width - group))
    kind = f"int{weight.bits}"
    scales_OG = weight.scales_OG[:, index_G].float()
    if torch.equal(scales_OG.half().float(), scales_OG):
        scales_OG = scales_OG.half()
    zeros_OG = None
    if weight.zeros_OG is not None:
        zeros_OG = weight.zeros_OG[:, index_G].to(torch.int8)
    return PackedWeight(kind, _codes(values_OGW, kind), scales_OG, columns, zeros_OG, group)


def _codes(values_OGW: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "int8":
        return values_OGW.flatten(1)
    low, high = (values_OGW + 8).to(torch.uint8).chunk(2, dim=-1)
    return (low | (high << 4)).flatten(1)
