"""LoRA adapters of linear layers in the C++ library (src/adapters.h)."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from kernels.adapters import AdapterModule, AdapterRuns
from kernels.cpu import library
from kernels.cpu.library import FLOAT_CODES


class ModuleView(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("parts", ctypes.c_int32),
        ("max_rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class RunsView(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_runs", ctypes.c_int32),
    )


class CpuAdapters:
    """One layer's slots for the library; `view` is valid while this object lives. Raises ValueError
    for tensors that are not contiguous on the CPU."""

    def __init__(self, module: AdapterModule) -> None:
        ends_M = torch.tensor(module.widths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self._kept = (module, ends_M)
        num_slots, parts, rank, in_features = module.a_CMRK.shape
        out_features = sum(module.widths)
        if module.b_CRO.shape != (num_slots, rank, out_features):
            raise ValueError(f"b_CRO has shape {tuple(module.b_CRO.shape)}")
        for tensor in (module.a_CMRK, module.b_CRO, module.ranks_CM):
            if not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise ValueError("adapters must be contiguous tensors on the CPU")
        self.num_slots = num_slots
        self.dtype = module.a_CMRK.dtype
        self.in_features, self.out_features = in_features, out_features
        self.view = ModuleView(
            module.a_CMRK.data_ptr(), module.b_CRO.data_ptr(), module.ranks_CM.data_ptr(),
            ends_M.data_ptr(), in_features, out_features, parts, rank, FLOAT_CODES[self.dtype],
        )  # fmt: skip

    @property
    def address(self) -> int:
        return ctypes.addressof(self.view)


def view_runs(runs: AdapterRuns, num_slots: int, num_tokens: int) -> RunsView:
    """The addresses of runs. Raises ValueError for slots or rows out of range."""
    if int(runs.slots.max()) >= num_slots or int(runs.rows_N.max()) >= num_tokens:
        raise ValueError(
            f"adapter slots {runs.slots.tolist()} of {num_slots}, or rows past the batch"
        )
    return RunsView(
        runs.rows_N.data_ptr(), runs.starts.ctypes.data, runs.slots.ctypes.data, len(runs.slots)
    )


@functools.cache
def _adapt() -> Any:
    views = (ctypes.POINTER(ModuleView), ctypes.POINTER(RunsView))
    return library.function("legato_adapt", None, *views, *[library.Pointer] * 2)


def add_adapters(
    module: AdapterModule, x_TK: torch.Tensor, y_TO: torch.Tensor, runs: AdapterRuns
) -> None:
    """`kernels.adapters.add_adapters`, batch-invariant. Raises ValueError for shapes, dtypes or
    slots that do not match."""
    adapters = CpuAdapters(module)
    widths = ((x_TK, adapters.in_features), (y_TO, adapters.out_features))
    for tensor, width in widths:
        if tensor.shape != (len(x_TK), width) or tensor.dtype != adapters.dtype:
            raise ValueError(f"{tuple(tensor.shape)} {tensor.dtype}: not {width} {adapters.dtype}")
    if not y_TO.is_contiguous():
        raise ValueError("y_TO must be contiguous")
    x_TK = x_TK.contiguous()
    view = view_runs(runs, adapters.num_slots, len(x_TK))
    _adapt()(adapters.view, view, x_TK.data_ptr(), y_TO.data_ptr())
