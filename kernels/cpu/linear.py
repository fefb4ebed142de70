"""Linear layers on packed weights, in C++ (src/linear.h).

Weights are float32, bfloat16 or float16 like the activations, or int8 or int4 with scales. Results
are batch-invariant: a token has the same bits alone and in any batch.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from kernels.cpu import library
from kernels.cpu.library import FLOAT_CODES, Pointer, pointer
from kernels.cpu.quantize import quantize
from kernels.quantized import InputRounding, QuantizedWeight

_INT64 = ctypes.c_int64
_ROUNDINGS: dict[InputRounding, int] = {"none": 0, "group": 1, "token": 2}


@functools.cache
def _function(name: str) -> Any:
    signatures: dict[str, tuple[Any, ...]] = {
        "pack": (Pointer, ctypes.c_int, _INT64, _INT64, Pointer, _INT64, Pointer),
        "pack_quantized": (
            *(Pointer, ctypes.c_int, ctypes.c_int, ctypes.c_int, _INT64, _INT64, _INT64),
            *(Pointer, Pointer, Pointer, Pointer, Pointer, Pointer),
        ),
        "forward_heads": (None, Pointer, _INT64, _INT64, Pointer, _INT64, _INT64, Pointer),
        "free": (None, Pointer),
        "bytes": (_INT64, Pointer),
        "time": (None, Pointer, _INT64, Pointer, _INT64, Pointer, Pointer),
    }
    forward = (None, Pointer, Pointer, _INT64, _INT64, Pointer, _INT64)
    return library.function(f"legato_linear_{name}", *signatures.get(name, forward))


class CpuLinear:
    """A packed weight; implements `kernels.interface.Linear`.

    `handle` is the address of the C++ `PackedLinear`, for code that fuses layers, and valid while
    this object lives.
    """

    def __init__(
        self, handle: int | None, in_features: int, out_features: int, dtype: torch.dtype
    ) -> None:
        if handle is None:
            raise MemoryError(f"no memory for a {out_features} x {in_features} weight")
        self.handle = handle
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self._finalizer = weakref.finalize(self, _function("free"), handle)
        # At exit the threads may still be using it: the end of the process frees it.
        self._finalizer.atexit = False
        self._forward = _function("forward")

    @property
    def num_bytes(self) -> int:
        """Bytes that a forward pass streams: the weight with its scales."""
        return int(_function("bytes")(self.handle))

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """x W^T + b in the dtype of x, which must be the weight's activation dtype."""
        x_TK = self._checked(x_TK)
        out_TO = torch.empty((x_TK.shape[0], self.out_features), dtype=self.dtype)
        self._run(self._forward, x_TK, out_TO)
        return out_TO

    def forward_f32(self, x_TK: torch.Tensor) -> torch.Tensor:
        """x W^T + b in float32."""
        x_TK = self._checked(x_TK)
        out_TO = torch.empty((x_TK.shape[0], self.out_features), dtype=torch.float32)
        self._run(_function("forward_f32"), x_TK, out_TO)
        return out_TO

    def _checked(self, x_TK: torch.Tensor) -> torch.Tensor:
        if x_TK.dtype != self.dtype or x_TK.dim() != 2 or x_TK.shape[1] != self.in_features:
            raise ValueError(
                f"x is {tuple(x_TK.shape)} {x_TK.dtype}, not (T, {self.in_features}) {self.dtype}"
            )
        return x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()

    def _run(self, function: Any, x_TK: torch.Tensor, out_TO: torch.Tensor) -> None:
        function(
            self.handle,
            x_TK.data_ptr(),
            x_TK.stride(0),
            x_TK.shape[0],
            out_TO.data_ptr(),
            out_TO.stride(0),
        )


class CpuHeadLinears:
    """Packed weights, one per head."""

    def __init__(self, weight_NOK: torch.Tensor) -> None:
        self._heads = [pack_linear(weight_OK) for weight_OK in weight_NOK]
        self._handles_N = torch.tensor([head.handle for head in self._heads])
        self._forward = _function("forward_heads")

    def __call__(self, x_TNK: torch.Tensor) -> torch.Tensor:
        first, num_heads = self._heads[0], len(self._heads)
        wanted = (num_heads, first.in_features)
        if x_TNK.dtype != first.dtype or x_TNK.shape[1:] != wanted:
            raise ValueError(
                f"x is {tuple(x_TNK.shape)} {x_TNK.dtype}, not (T, *{wanted}) {first.dtype}"
            )
        if x_TNK.stride()[1:] != (first.in_features, 1):
            x_TNK = x_TNK.contiguous()
        y_TNO = torch.empty((len(x_TNK), num_heads, first.out_features), dtype=first.dtype)
        self._forward(
            *(self._handles_N.data_ptr(), num_heads, x_TNK.element_size(), x_TNK.data_ptr()),
            *(x_TNK.stride(0), len(x_TNK), y_TNO.data_ptr()),
        )
        return y_TNO


def pack_linear(
    weight_OK: torch.Tensor, bias_O: torch.Tensor | None = None, quantization: str = "none"
) -> CpuLinear:
    """Pack a weight for this CPU; the caller may drop the original afterwards.

    quantization: "none", "int8" (one scale per output row), "int8-gN" or "int4-gN" (one scale per N
    inputs of a row, N in 32, 64, 128), "int4" (the same as "int4-g32"), "w8a8" and "w4a8" (as int8
    and int4, with x rounded to 8 bits). x and y have the weight's dtype. ValueError for another
    dtype or name, MemoryError without memory.
    """
    if weight_OK.dtype not in FLOAT_CODES:
        raise ValueError(f"no CPU kernel for {weight_OK.dtype} weights")
    if quantization != "none":
        return pack_quantized(quantize(weight_OK, quantization), bias_O, weight_OK.dtype)
    weight_OK = weight_OK if weight_OK.stride(1) == 1 else weight_OK.contiguous()
    bias = _float(bias_O)
    out_features, in_features = weight_OK.shape
    handle = _function("pack")(
        FLOAT_CODES[weight_OK.dtype],
        out_features,
        in_features,
        weight_OK.data_ptr(),
        weight_OK.stride(0),
        pointer(bias),
    )
    return CpuLinear(handle, in_features, out_features, weight_OK.dtype)


def pack_quantized(
    weight: QuantizedWeight, bias_O: torch.Tensor | None, dtype: torch.dtype
) -> CpuLinear:
    """Pack an integer-quantized weight; `dtype` is that of the activations. Raises ValueError for
    another dtype, MemoryError without memory."""
    if dtype not in FLOAT_CODES:
        raise ValueError(f"no CPU kernel for {dtype} activations")
    out_features, in_features = weight.values_OK.shape
    values = weight.values_OK.contiguous()
    grouped = weight.group_size > 0
    row_scales = None if grouped else _float(weight.scales_OG[:, 0])
    scales = weight.scales_OG.to(torch.float16).contiguous() if grouped else None
    zeros = None
    if weight.zeros_OG is not None:
        zeros = weight.zeros_OG.to(torch.float16).contiguous()
    permutation = None
    if weight.permutation_K is not None:
        permutation = weight.permutation_K.to(torch.int32).contiguous()
    bias = _float(bias_O)
    handle = _function("pack_quantized")(
        FLOAT_CODES[dtype],
        weight.bits,
        _ROUNDINGS[weight.input_rounding],
        out_features,
        in_features,
        weight.group_size,
        *map(pointer, (values, row_scales, scales, zeros, permutation, bias)),
    )
    return CpuLinear(handle, in_features, out_features, dtype)


def time_linears(linears: Sequence[CpuLinear], x_TK: torch.Tensor) -> list[float]:
    """Seconds of each layer (all of one shape) on x, called one after another from C++."""
    first = linears[0]
    x_TK = first._checked(x_TK).contiguous()
    out_TO = torch.empty((x_TK.shape[0], first.out_features), dtype=first.dtype)
    handles = torch.tensor([linear.handle for linear in linears])
    seconds = torch.empty(len(linears), dtype=torch.float64)
    _function("time")(
        *(handles.data_ptr(), len(linears), x_TK.data_ptr(), x_TK.shape[0]),
        *(out_TO.data_ptr(), seconds.data_ptr()),
    )
    return [float(value) for value in seconds]


def _float(values_O: torch.Tensor | None) -> torch.Tensor | None:
    return None if values_O is None else values_O.to(torch.float32).contiguous()
