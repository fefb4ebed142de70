"""Products with packed weights against float64: those quantized at load, and those that checkpoints
bring."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from app.bench.gpu.checks import CheckResult, check_result, poisoned_outputs
from kernels.packing import QUANTIZATIONS, pack_weight
from kernels.quantized import QuantizedWeight
from kernels.triton import reference
from kernels.triton.backend import TritonBackend
from kernels.triton.linear import QuantizedLinear


@dataclass(frozen=True, slots=True)
class CheckpointCase:
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


CHECKPOINTS = (
    CheckpointCase(4, 128, has_zeros=True),  # AWQ, GPTQ
    CheckpointCase(4, 128),  # compressed-tensors, symmetric
    CheckpointCase(4, 32, has_zeros=True, act_order=True),
    CheckpointCase(8, 128, has_zeros=True),
)


def check_quantized(
    dtype: torch.dtype, device: torch.device, tokens: int, features: tuple[int, int]
) -> Iterator[CheckResult]:
    """Weights quantized at load, against the packed numbers in float64."""
    K, outputs = features
    weight = torch.randn(outputs, K, device=device) / math.sqrt(K)
    bias = torch.randn(outputs, device=device).to(dtype)
    x = torch.randn(tokens, K, device=device).to(dtype)
    for kind in QUANTIZATIONS:
        packed = pack_weight(weight, kind)
        with poisoned_outputs():
            out = QuantizedLinear(packed, bias)(x)
        expected = x.double() @ packed.dequantize(torch.float32).double().T + bias.double()
        error = reference.relative_error(out, expected)
        yield check_result(f"triton linear {kind} {tokens}x{K}x{outputs}", dtype, error)


def check_checkpoint(
    case: CheckpointCase,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    features: tuple[int, int],
) -> CheckResult:
    """Weights as a checkpoint brings them, against its numbers in float64."""
    K, outputs = features
    weight = case.draw(outputs, K)
    bias = torch.randn(outputs, device=device).to(dtype)
    x = torch.randn(tokens, K, device=device).to(dtype)
    linear = TritonBackend().pack_quantized([weight], bias, dtype, device)
    with poisoned_outputs():
        out = linear(x)
    expected = x.double() @ weight.dequantize().to(device).T + bias.double()
    error = reference.relative_error(out, expected)
    return check_result(f"triton linear {case.name} {tokens}x{K}x{outputs}", dtype, error)
