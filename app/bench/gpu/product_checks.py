"""Products against float64: with dense weights, with those quantized at load, and with those that
checkpoints bring packed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from app.bench.gpu.checks import BOUNDS, CheckResult, poisoned_outputs
from app.bench.gpu.stored_case import RoundedCase, StoredCase
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

ROUNDED_CASES = (
    RoundedCase(),  # int8 by token, as `model.quantization: w8a8` makes them
    RoundedCase(float8=True),
    RoundedCase(group_size=128),
    RoundedCase(group_size=128, by_group=True),
    RoundedCase(float8=True, group_size=128, by_group=True),  # DeepSeek
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


def check_rounded(
    case: RoundedCase,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    features: tuple[int, int],
) -> Iterator[CheckResult]:
    """Rounded inputs against the input, and products against the rounded numbers in float64; a
    token alone and among all, whose bits are to be the same."""
    K, outputs = features
    weight = case.draw(outputs, K)
    bias = torch.randn(outputs, device=device).to(dtype)
    x = torch.randn(tokens, K, device=device).to(dtype)
    linear = TritonBackend().pack_quantized([weight], bias, dtype, device)
    with poisoned_outputs():
        out = linear(x)
        wide = linear.forward_f32(x)
    rounded = weight.round_inputs(x.cpu()).double().to(device)
    expected = rounded @ weight.dequantize().to(device).T + bias.double()
    name = f"triton linear {case.name} {tokens}x{K}x{outputs}"
    yield _result(name, dtype, reference.relative_error(out, expected))
    # Scales, their product and the bias round; int8 sums are exact, e4m3 products within a block
    # of 128 are summed in 14 bits by Hopper's tensor cores.
    bound = 1e-3 if case.float8 else 1e-6
    error = reference.relative_error(wide, expected)
    yield CheckResult(f"{name}, float32", "float32", error, bound)
    alone = torch.cat([linear(x[t : t + 1]) for t in (0, tokens - 1)])
    together = out[[0, tokens - 1]]
    error = 0.0 if torch.equal(alone, together) else math.inf
    yield CheckResult(f"{name}, alone", str(dtype).removeprefix("torch."), error, 0.0)


def _result(name: str, dtype: torch.dtype, error: float) -> CheckResult:
    return CheckResult(name, str(dtype).removeprefix("torch."), error, BOUNDS[dtype])
