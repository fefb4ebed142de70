"""Quantized weights as checkpoints store them, drawn at random."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kernels.quantized import FLOAT8, QuantizedWeight


@dataclass(frozen=True, slots=True)
class StoredCase:
    """Integers of a checkpoint. group_size 0: one scale per row."""

    bits: int
    group_size: int
    has_zeros: bool = False
    act_order: bool = False

    @property
    def name(self) -> str:
        parts = (f"int{self.bits}", self.group_size and f"groups of {self.group_size}",
                 self.has_zeros and "zeros", self.act_order and "act order")  # fmt: skip
        return ", ".join(str(part) for part in parts if part)

    def draw(self, out_features: int, in_features: int) -> QuantizedWeight:
        """A random weight, on the CPU, of which x of ones' size makes outputs of that size."""
        highest = 1 << (self.bits - 1)
        num_groups = math.ceil(in_features / self.group_size) if self.group_size else 1
        size = (out_features, num_groups)
        scales_OG = (0.5 + torch.rand(size)) / (highest * math.sqrt(in_features))
        return QuantizedWeight(
            torch.randint(-highest, highest, (out_features, in_features), dtype=torch.int8),
            scales_OG.half().float() if self.group_size else scales_OG,
            self.bits,
            self.group_size,
            torch.randint(-highest, highest, size).float() if self.has_zeros else None,
            torch.randperm(in_features) if self.act_order else None,
        )


@dataclass(frozen=True, slots=True)
class RoundedCase:
    """8-bit codes whose inputs are rounded by token, or by the weight's groups."""

    float8: bool = False
    group_size: int = 0
    by_group: bool = False
    act_order: bool = False

    @property
    def name(self) -> str:
        parts = ("fp8_w8a8" if self.float8 else "w8a8",
                 self.group_size and f"groups of {self.group_size}",
                 self.by_group and "inputs too", self.act_order and "act order")  # fmt: skip
        return ", ".join(str(part) for part in parts if part)

    def draw(self, out_features: int, in_features: int) -> QuantizedWeight:
        """See `StoredCase.draw`."""
        weight = StoredCase(8, self.group_size, act_order=self.act_order).draw(
            out_features, in_features
        )
        if self.float8:
            weight = replace(weight, values_OK=weight.values_OK.float().to(FLOAT8))
        return replace(weight, input_rounding="group" if self.by_group else "token")
