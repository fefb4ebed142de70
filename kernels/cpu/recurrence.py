"""Convolutions and recurrences with a state in the C++ library (src/recurrence.h).

Shape suffixes as in `kernels.recurrence`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from kernels.cpu import library
from kernels.cpu.library import FLOAT_CODES, check
from kernels.recurrence import Recurrence, StateLayer, StateRows

_MAX_TAPS = 8


class _RowsView(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("query_starts", "reads", "writes")],
        *[(name, ctypes.c_void_p) for name in ("saves", "save_lengths")],
        ("num_slices", ctypes.c_int32),
    )


class _ConvView(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("x", "weight", "bias", "states", "y")],
        *[(name, ctypes.c_int64) for name in ("x_stride", "num_channels")],
        *[(name, ctypes.c_int32) for name in ("num_taps", "dtype")],
        ("silu", ctypes.c_bool),
    )


class _RecurrenceView(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("qkv", "decays", "rates", "states", "out")],
        *[(name, ctypes.c_int64) for name in ("qkv_stride", "decays_stride", "rates_stride")],
        *[(name, ctypes.c_int32) for name in ("num_key_heads", "num_heads", "key_dim")],
        *[(name, ctypes.c_int32) for name in ("value_dim", "dtype")],
        ("delta", ctypes.c_bool),
    )


@functools.cache
def _function(name: str, view: Any) -> Any:
    views = (ctypes.POINTER(view), ctypes.POINTER(_RowsView))
    return library.function(f"legato_{name}", None, *views)


def causal_conv(
    x_TC: torch.Tensor,
    weight_JC: torch.Tensor,
    bias_C: torch.Tensor | None,
    layer: StateLayer,
    rows: StateRows,
    silu: bool,
) -> torch.Tensor:
    """`Recurrent.causal_conv`, batch-invariant. Raises ValueError for what the kernel would
    misread, and for more than 8 taps."""
    check("weight_JC", weight_JC, 2, torch.float32)
    num_taps, num_channels = weight_JC.shape
    if not 1 <= num_taps <= _MAX_TAPS:
        raise ValueError(f"weight_JC has {num_taps} taps, not 1 to {_MAX_TAPS}")
    _check_rows("x_TC", x_TC, None, (len(x_TC), num_channels))
    if bias_C is not None:
        check("bias_C", bias_C, 1, torch.float32, (num_channels,))
    state_RJC = layer.conv_RJC
    check("conv_RJC", state_RJC, 3, x_TC.dtype, (len(state_RJC), num_taps - 1, num_channels))
    view_rows = _view(rows, len(x_TC))
    y_TC = torch.empty((len(x_TC), num_channels), dtype=x_TC.dtype)
    view = _ConvView(
        x_TC.data_ptr(), weight_JC.data_ptr(), library.pointer(bias_C), state_RJC.data_ptr(),
        y_TC.data_ptr(), x_TC.stride(0), num_channels, num_taps, FLOAT_CODES[x_TC.dtype], silu,
    )  # fmt: skip
    _function("causal_conv", _ConvView)(view, view_rows)
    return y_TC


def recurrence(
    qkv_TC: torch.Tensor,
    decays_TN: torch.Tensor,
    rates_TN: torch.Tensor,
    layer: StateLayer,
    rows: StateRows,
    form: Recurrence,
) -> torch.Tensor:
    """`Recurrent.recurrence`, batch-invariant. Raises ValueError for what the kernel would
    misread."""
    matrix_RNFD = layer.matrix_RNFD
    if matrix_RNFD is None:
        raise ValueError("a recurrence needs a layer with matrices")
    num_tokens, num_heads = len(qkv_TC), form.num_heads
    if form.num_key_heads < 1 or num_heads % form.num_key_heads:
        raise ValueError(
            f"num_heads {num_heads} is not a multiple of num_key_heads {form.num_key_heads}"
        )
    _check_rows("qkv_TC", qkv_TC, None, (num_tokens, form.num_channels))
    for name, tensor_TN in (("decays_TN", decays_TN), ("rates_TN", rates_TN)):
        _check_rows(name, tensor_TN, torch.float32, (num_tokens, num_heads))
    sizes = (len(matrix_RNFD), num_heads, form.key_dim, form.value_dim)
    check("matrix_RNFD", matrix_RNFD, 4, torch.float32, sizes)
    view_rows = _view(rows, num_tokens)
    out_TX = torch.empty((num_tokens, num_heads * form.value_dim), dtype=qkv_TC.dtype)
    view = _RecurrenceView(
        qkv_TC.data_ptr(), decays_TN.data_ptr(), rates_TN.data_ptr(), matrix_RNFD.data_ptr(),
        out_TX.data_ptr(), qkv_TC.stride(0), decays_TN.stride(0), rates_TN.stride(0),
        form.num_key_heads, num_heads, form.key_dim, form.value_dim, FLOAT_CODES[qkv_TC.dtype],
        form.delta,
    )  # fmt: skip
    _function("recurrence", _RecurrenceView)(view, view_rows)
    return out_TX


def _check_rows(
    name: str, tensor_TX: torch.Tensor, dtype: torch.dtype | None, shape: tuple[int, int]
) -> None:
    """`check` of rows that may be parts of longer ones."""
    if tensor_TX.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor_TX.shape)}, expected {shape}")
    is_typed = tensor_TX.dtype == dtype if dtype is not None else tensor_TX.dtype in FLOAT_CODES
    if not (is_typed and tensor_TX.is_cpu and tensor_TX.stride(1) == 1):
        check(name, tensor_TX[:1] if tensor_TX.stride(1) == 1 else tensor_TX, 2, dtype)


def _view(rows: StateRows, num_tokens: int) -> _RowsView:
    """The addresses of rows. Raises ValueError for what O(1) checks can tell."""
    num_slices = len(rows.reads_S)
    check("query_starts_S1", rows.query_starts_S1, 1, torch.int32, (num_slices + 1,))
    check("reads_S", rows.reads_S, 1, torch.int32)
    check("writes_S", rows.writes_S, 1, torch.int32, (num_slices,))
    saves_S, lengths_S = rows.saves_S, rows.save_lengths_S
    if saves_S is not None and lengths_S is not None:
        check("saves_S", saves_S, 1, torch.int32, (num_slices,))
        check("save_lengths_S", lengths_S, 1, torch.int32, (num_slices,))
    elif saves_S is not None or lengths_S is not None:
        raise ValueError("saves_S and save_lengths_S: one of them is missing")
    if (end := int(rows.query_starts_S1[-1])) != num_tokens:
        raise ValueError(f"query_starts_S1 ends at {end}, not at {num_tokens} tokens")
    return _RowsView(
        rows.query_starts_S1.data_ptr(), rows.reads_S.data_ptr(), rows.writes_S.data_ptr(),
        library.pointer(saves_S), library.pointer(lengths_S), num_slices,
    )  # fmt: skip
