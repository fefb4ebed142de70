"""All-reduce among the ranks of one machine, through shared memory (src/all_reduce.cpp)."""

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
    """An all-reduce failed: a rank died, left or timed out."""


def check(error: int) -> None:
    """Raise RankError for a non-zero error code of the library."""
    if error:
        raise RankError(_ERRORS[error])


class SharedMemoryAllReduce:
    """Implements `AllReduce`. Not thread-safe, except `close`."""

    def __init__(self, fd: int, rank: int, num_ranks: int) -> None:
        """fd: a zeroed file of `file_bytes(num_ranks)` that all ranks open; the caller may close it
        afterwards. Raises OSError where it cannot be mapped."""
        pointer, int32 = library.Pointer, ctypes.c_int32
        opened = library.function("legato_all_reduce_open", pointer, int32, int32, int32)
        self.handle: int | None = opened(fd, rank, num_ranks)
        if self.handle is None:
            raise OSError("the file that ranks share cannot be mapped")
        self._sum = library.function(
            "legato_all_reduce_sum", int32, pointer, pointer, ctypes.c_int64, int32
        )

    def try_all_reduce(self, x: torch.Tensor) -> bool:
        code = FLOAT_CODES.get(x.dtype)
        if code is None or not x.is_contiguous():
            return False
        check(self._sum(self.handle, x.data_ptr(), x.numel(), code))
        return True

    def close(self) -> None:
        library.function("legato_all_reduce_close", None, library.Pointer)(self.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            library.function("legato_all_reduce_free", None, library.Pointer)(self.handle)
            self.handle = None


def file_bytes(num_ranks: int) -> int:
    size = library.function("legato_all_reduce_file_bytes", ctypes.c_int64, ctypes.c_int32)
    return int(size(num_ranks))
