"""Sums over the ranks of a stage on one machine, through memory that all map (src/ranks.cpp)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library
from kernels.cpu.library import FLOAT_CODES

_ERRORS = (
    "",
    "a rank of this stage has died",
    "a rank of this stage has left",
    "a rank of this stage does not come",
)


class RankError(RuntimeError):
    """Ranks cannot go on together."""


def check(error: int) -> None:
    """Raises RankError for what a sum returned, if it is one."""
    if error:
        raise RankError(_ERRORS[error])


class CpuRankSums:
    """A `RankSums`. Not thread-safe, but for `close`."""

    def __init__(self, fd: int, rank: int, num_ranks: int) -> None:
        """fd: a file of `file_bytes(num_ranks)` zeros that all ranks open; it may be closed then.
        Raises OSError where it cannot be mapped."""
        pointer, int32 = library.Pointer, ctypes.c_int32
        opened = library.function("legato_ranks_open", pointer, int32, int32, int32)
        self.handle: int | None = opened(fd, rank, num_ranks)
        if self.handle is None:
            raise OSError("the file that ranks share cannot be mapped")
        self._sum = library.function(
            "legato_ranks_sum", int32, pointer, pointer, ctypes.c_int64, int32
        )

    def add(self, x: torch.Tensor) -> bool:
        code = FLOAT_CODES.get(x.dtype)
        if code is None or not x.is_contiguous():
            return False
        check(self._sum(self.handle, x.data_ptr(), x.numel(), code))
        return True

    def close(self) -> None:
        library.function("legato_ranks_close", None, library.Pointer)(self.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            library.function("legato_ranks_free", None, library.Pointer)(self.handle)
            self.handle = None


def file_bytes(num_ranks: int) -> int:
    size = library.function("legato_ranks_file_bytes", ctypes.c_int64, ctypes.c_int32)
    return int(size(num_ranks))
