"""Products against float64: with dense weights, with those quantized at load, and with those that
checkpoints bring packed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from app.bench.gpu.checks import BOUNDS, CheckResult, poisoned_outputs
from app.bench.gpu.stored_case import StoredCase
from kernels.packing import QUANTIZATIONS, pack_weight
from kernels.triton import reference
from kernels.triton.backend import TritonBackend
from kernels.triton.linear import QuantizedLinear

STORED_CASES = (
    StoredCase(4, 128, has_zeros=True),  # AWQ, GPTQ
    StoredCase(4, 128),  # compressed-tensors, symmetric
    StoredCase(4, 32, has_zeros=True, act_order=True),
    StoredCase(8, 128, has_zeros=True),
)


def check_dense(
    dtype: torch.dtype, device: torch.device, tokens: int, features: tuple[int, int], biased: bool
) -> CheckResult:
    """A dense weight, by whichever kernel its layer takes for so many tokens."""
    K, outputs = features
    weight = torch.randn(outputs, K, device=device) / math.sqrt(K)
    bias = torch.randn(outputs, device=device).to(dtype) if biased else None
    x = torch.randn(tokens, K, device=device).to(dtype)
    linear = TritonBackend().pack_linear(weight.to(dtype), bias)
    with poisoned_outputs():
        out = linear(x)
    expected = x.double() @ weight.to(dtype).double().T
    if bias is not None:
        expected += bias.double()
    error = reference.relative_error(out, expected)
    return _result(f"triton linear {tokens}x{K}x{outputs}", dtype, error)


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
        yield _result(f"triton linear {kind} {tokens}x{K}x{outputs}", dtype, error)


def check_stored(
    case: StoredCase,
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
    return _result(f"triton linear {case.name} {tokens}x{K}x{outputs}", dtype, error)


def _result(name: str, dtype: torch.dtype, error: float) -> CheckResult:
    return CheckResult(name, str(dtype).removeprefix("torch."), error, BOUNDS[dtype])
