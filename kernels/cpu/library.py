"""The C++ library, loaded by ctypes.

`load()` returns the library or logs why there is none. Functions take raw pointers, so each has
one typed Python wrapper next to the operation it serves; tensors must stay alive for the duration
of the call, which runs without the GIL.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.cpu.source_hash import source_hash

_PATH = Path(__file__).with_name("liblegato.so")
_logger = logging.getLogger(__name__)

Pointer = ctypes.c_void_p
# Dtype codes of the library; the KV cache also supports int8.
FLOAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DTYPE_CODES = {**FLOAT_CODES, torch.int8: 3}


class Isa(enum.IntEnum):
    """Instruction sets the library is compiled for, narrow to wide."""

    AVX2 = 0
    AVX512 = 1
    AVX512_VNNI = 2
    AVX512_BF16 = 3
    AMX = 4


class StaleLibrary(Exception):
    """The library was built from other sources than those beside it.

    An error rather than a fallback to another backend: called with other argument layouts, it would
    compute wrong results or crash."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None (with a logged reason) where it was not built or the CPU is too old.

    `LEGATO_CPU_ISA=avx2|avx512|avx512_vnni|avx512_bf16|amx` lowers the instruction set,
    `LEGATO_CPU_THREADS` is the number of compute threads until they are set, as each rank of a
    server does (`parallel.threads_per_rank`); both are read once, here. Raises ValueError for
    another name, StaleLibrary where the C++ sources have changed since the library was built.
    """
    asked = os.environ.get("LEGATO_CPU_ISA") or "amx"
    if asked not in (known_sets := [name.lower() for name in Isa.__members__]):
        known = ", ".join(known_sets)
        raise ValueError(f"LEGATO_CPU_ISA={asked}: there is no such set; known: {known}")
    if not _PATH.exists():
        _logger.warning("CPU library not built (%s): torch computes instead", _PATH.name)
        return None
    try:
        library = ctypes.CDLL(str(_PATH))
    except OSError as error:
        _logger.warning("CPU library not loadable (%s): torch computes instead", error)
        return None
    _check_fresh(library)
    if library.legato_isa() < 0:
        _logger.warning("this CPU has no AVX2: torch computes instead")
        return None
    used = Isa(library.legato_isa())
    wanted = min(Isa[asked.upper()], Isa(library.legato_machine_isa()))
    if used < wanted:
        message = "the CPU library has no %s and uses %s instead: `make build` builds it with all"
        _logger.warning(message, wanted.name.lower(), used.name.lower())
    _logger.info("CPU library: %s, %d threads", used.name.lower(), library.legato_num_threads())
    return library


def _check_fresh(library: ctypes.CDLL) -> None:
    wanted = source_hash()
    if wanted is None:  # a wheel: library and callers are packaged together
        return
    try:
        tell = library["legato_built"]
    except AttributeError:  # built before it could tell
        found = None
    else:
        tell.restype = ctypes.c_char_p
        found = tell().decode().split()[0]
    if found != wanted:
        raise StaleLibrary(
            f"{_PATH.name} was built from other C++ sources than those in {_PATH.parent}/src: run "
            "`make build` (python setup.py -q build_ext --inplace)"
        )


def require() -> ctypes.CDLL:
    """The library. Raises RuntimeError where `load()` returns None."""
    library = load()
    if library is None:
        raise RuntimeError("the CPU library is not available; reinstall with a C++17 compiler")
    return library


def function(name: str, restype: Any, *argtypes: Any) -> Any:
    """One C function with its types declared (a new object per call, so declarations never
    clash)."""
    symbol = require()[name]
    symbol.restype = restype
    symbol.argtypes = list(argtypes)
    return symbol


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of a tensor's first element; None for None."""
    return None if tensor is None else tensor.data_ptr()


def isa() -> Isa:
    """The instruction set in force."""
    return Isa(require().legato_isa())


def set_isa(value: Isa) -> Isa:
    """Lower or restore the instruction set, for tests; weights must be packed again afterwards."""
    return Isa(require().legato_set_isa(int(value)))


def num_threads() -> int:
    """Compute threads, the calling one included."""
    return int(require().legato_num_threads())


def set_num_threads(count: int) -> None:
    """Resize the pool of compute threads, from 1."""
    if count < 1:
        raise ValueError(f"num_threads must be at least 1, not {count}")
    require().legato_set_num_threads(count)


def stream_read(tensor: torch.Tensor) -> float:
    """Sum a contiguous float32 tensor with all threads: a streaming read, to time bandwidth."""
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError("stream_read takes a contiguous float32 tensor")
    read = function("legato_stream_read", ctypes.c_float, Pointer, ctypes.c_int64)
    return float(read(tensor.data_ptr(), tensor.numel()))


def multiply_in_registers(count_per_task: int, num_tasks: int) -> int:
    """Multiply-adds in registers with all threads, to time peak FLOPs; returns the number of
    floating-point operations."""
    multiply = function(
        "legato_multiply_in_registers", ctypes.c_int64, ctypes.c_int64, ctypes.c_int64
    )
    return int(multiply(count_per_task, num_tasks))


def check(
    name: str,
    tensor: torch.Tensor,
    dims: int,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
) -> None:
    """Raises ValueError for what the kernels would misread."""
    if tensor.dim() != dims or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"{name} must be a contiguous {dims}-dimensional tensor on the CPU")
    if tensor.dtype != dtype if dtype is not None else tensor.dtype not in FLOAT_CODES:
        raise ValueError(f"{name} is {tensor.dtype}, expected {dtype or 'a floating dtype'}")
    if shape is not None and tensor.shape != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")


def check_norm(name: str, weight_H: torch.Tensor, dtype: torch.dtype, width: int) -> bool:
    """Whether a norm's weights are wider than what it norms, of this type. Raises ValueError for
    what the kernels would misread."""
    is_wide = weight_H.dtype == torch.float32 != dtype
    check(name, weight_H, 1, torch.float32 if is_wide else dtype, (width,))
    return is_wide
