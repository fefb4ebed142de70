"""Quantization of weights to int8, int4 or fp8, packed in the layout of the GPU kernel.

Each group of 128 input features of one output row has its own scale, symmetric about 0; int8
and int4 use the same grid as backend `torch`, so both give the same values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.triton.cache import FLOAT8
from kernels.triton.float8 import MAX_E4M3

GROUP = 128
QUANTIZATIONS = ("int8", "int4", "fp8")


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One quantized weight matrix; C is K rounded up to whole groups.

    codes: int8 (O, C); for "int4" uint8 (O, C / 2), where byte j of a group holds feature j in
        its low half and feature j + 64 in its high half, each plus 8; for "fp8" e4m3 in uint8.
    scales: float32 (O, C / 128).
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    in_features: int

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def pack_weight(weight_OK: torch.Tensor, kind: str) -> PackedWeight:
    """Raises ValueError for a kind that is not one of QUANTIZATIONS."""
    if kind not in QUANTIZATIONS:
        known = ", ".join(("none", *QUANTIZATIONS))
        raise ValueError(f"quantization {kind!r} is unknown; known: {known}")
    rows, columns = weight_OK.shape
    padded_OC = functional.pad(weight_OK.float(), (0, -columns % GROUP))
    grouped_OGK = padded_OC.view(rows, -1, GROUP)
    highest = {"int8": 127.0, "int4": 7.0, "fp8": MAX_E4M3}[kind]
    scale_OG1 = grouped_OGK.abs().amax(-1, keepdim=True).clamp(min=1e-12) / highest
    scaled_OGK = grouped_OGK / scale_OG1
    if kind == "fp8":
        codes = scaled_OGK.to(FLOAT8).view(torch.uint8)
    else:
        codes = scaled_OGK.round().clamp(-highest - 1, highest).to(torch.int8)
    if kind == "int4":
        shifted = (codes + 8).to(torch.uint8)
        low, high = shifted.chunk(2, dim=-1)
        codes = low | (high << 4)
    return PackedWeight(
        kind, codes.reshape(rows, -1).contiguous(), scale_OG1.squeeze(-1).contiguous(), columns
    )


def unpack_weight(packed: PackedWeight) -> torch.Tensor:
    """float32 (O, K): the dequantized weight, the kernel's reference."""
    rows = packed.out_features
    if packed.kind == "int4":
        grouped = packed.codes.view(rows, -1, GROUP // 2)
        values = torch.cat((grouped & 15, grouped >> 4), dim=-1).float() - 8
    elif packed.kind == "fp8":
        values = packed.codes.view(FLOAT8).float().view(rows, -1, GROUP)
    else:
        values = packed.codes.float().view(rows, -1, GROUP)
    weight_OC = (values * packed.scales[..., None]).view(rows, -1)
    return weight_OC[:, : packed.in_features]
