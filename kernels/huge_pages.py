"""Zeroed memory on huge pages, where the system grants them: whoever reads it in many short pieces
would miss the TLB at each small page."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch

HUGE_PAGE_BYTES = 2 << 20
_ARENA_BYTES = 16 * HUGE_PAGE_BYTES
_ALIGNMENT = 64


def map_zeros(num_bytes: int) -> torch.Tensor:
    """A mapping of its own as uint8, which takes memory when it is first written."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE_BYTES:
        with suppress(OSError):  # of a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of a mapping of its own on a CPU, from torch elsewhere."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return map_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class Arena:
    """Tensors side by side in large mappings, each of which lives while one of its tensors does."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        taken = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if taken > len(self._left):
            self._left = map_zeros(max(taken, _ARENA_BYTES))
        memory, self._left = self._left[:num_bytes], self._left[taken:]
        return memory.view(dtype).view(shape)
