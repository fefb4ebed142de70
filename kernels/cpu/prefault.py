"""Back a KV cache with memory before its blocks are used, and not at the expense of steps.

The first write to a page takes a fault, in every layer: a step of 30 ms then takes 200. Clearing
gigabytes takes seconds, and on a virtual machine whose host gave the memory to others ten: each
huge page then holds a core for milliseconds, which no priority in this machine can shorten.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import torch

from kernels.huge_pages import HUGE_PAGE_BYTES

_AT_ONCE_BYTES = 128 << 20  # before the first step, and ahead of the blocks in use ever after
_QUIET_S = 0.05  # without a step: the engine is idle
_LOOK_EVERY_S = 0.01
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it


class _Steps:
    """When this process, which may have several caches, last computed."""

    end_s = -math.inf  # infinity during a step


class Prefault:
    """Backs blocks in their order: a first part at once, the rest from a thread, while no step runs
    or where steps come near. A cache that is done no longer tells of its steps: another one of the
    process, a draft model's, may then be backed beside them.

    Without MADV_POPULATE_WRITE (Linux before 5.14) pages are faulted in on first use.
    """

    def __init__(self, layers: torch.Tensor) -> None:
        """layers: (num_layers, num_blocks, bytes of a block), uint8, in one mapping; contents are
        kept."""
        self._layers = layers
        num_layers, _, size = layers.shape
        self._num_ahead = max(1, _AT_ONCE_BYTES // (num_layers * size))
        self._num_used = 0  # blocks, from the first, that steps have written to
        self._num_backed = 0
        self._done = threading.Event()
        pieces = self._pieces()
        for first_block, address, num_bytes in pieces:
            if first_block >= self._num_ahead:
                break
            if not _populate(address, num_bytes):
                self._done.set()
                return
        else:
            self._done.set()
            return
        rest = ((first_block, address, num_bytes), pieces)
        threading.Thread(target=self._go_on, args=rest, name="legato-prefault", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, limit_s: float | None = None) -> bool:
        """Until all blocks are backed, or cannot be, at most limit_s; whether it is over."""
        return self._done.wait(limit_s)

    def step_goes_on(self, slot_mapping_T: torch.Tensor, block_size: int) -> None:
        """Called by each layer of a step whose layers are called one by one."""
        if not self._done.is_set():
            self.step_begins(int(slot_mapping_T.max()) // block_size + 1)
            self.step_ends()

    def step_begins(self, num_used: int) -> None:
        """num_used: blocks from the first to the last that the step writes to."""
        # Those far off are a draft model's few spare ones, at the end of its cache.
        if num_used <= self._num_backed + self._num_ahead:
            self._num_used = max(self._num_used, num_used)
        _Steps.end_s = math.inf

    def step_ends(self) -> None:
        _Steps.end_s = time.monotonic()

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """(first block, address, bytes) of some blocks in one layer, about a huge page."""
        num_layers, num_blocks, size = self._layers.shape
        count = max(1, HUGE_PAGE_BYTES // size)
        for begin in range(0, num_blocks, count):
            num_bytes = (min(begin + count, num_blocks) - begin) * size
            for layer in range(num_layers):
                address = self._layers[layer, begin].data_ptr()
                page = address % mmap.PAGESIZE
                yield begin, address - page, num_bytes + page

    def _go_on(self, first: tuple[int, int, int], pieces: Iterator[tuple[int, int, int]]) -> None:
        with suppress(OSError):  # where a sandbox forbids it
            # Steps of other processes take precedence too.
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        for first_block, address, num_bytes in itertools.chain([first], pieces):
            self._num_backed = first_block
            while self._must_wait(first_block):
                time.sleep(_LOOK_EVERY_S)
            if not _populate(address, num_bytes):
                break
        self._done.set()

    def _must_wait(self, first_block: int) -> bool:
        is_idle = time.monotonic() - _Steps.end_s > _QUIET_S
        return not is_idle and first_block > self._num_used + self._num_ahead


def _populate(address: int, num_bytes: int) -> bool:
    """False where the system cannot. Releases the GIL, which `mmap.madvise` does not."""
    return _madvise(address, num_bytes, _MADV_POPULATE_WRITE) == 0


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
