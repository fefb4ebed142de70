"""Memory behind a KV cache before its first use."""

import ctypes
import math
import mmap
import threading

import torch

from kernels.cpu import prefault
from kernels.cpu.prefault import Prefault
from kernels.huge_pages import HUGE_PAGE_BYTES

_LAYERS, _BLOCKS, _BLOCK_BYTES = 2, 32, 1 << 20  # two blocks a huge page


def _layers() -> tuple[mmap.mmap, torch.Tensor]:
    size = _LAYERS * _BLOCKS * _BLOCK_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = torch.frombuffer(memory, dtype=torch.uint8, count=size)
    return memory, data.view(_LAYERS, _BLOCKS, _BLOCK_BYTES)


def _num_backed_bytes(layers: torch.Tensor) -> int:
    """Bytes of the mapping that are in memory, as the system counts them."""
    pages = (ctypes.c_ubyte * (layers.numel() // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(layers.data_ptr(), layers.numel(), pages) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def test_all_memory_is_backed_and_contents_are_kept() -> None:
    memory, layers = _layers()
    layers[1, 3] = 7
    found = Prefault(layers)
    assert found.wait(30)
    assert found.is_done
    assert _num_backed_bytes(layers) >= layers.numel()
    assert bool((layers[1, 3] == 7).all())
    assert not layers[0].any()
    assert len(memory) == layers.numel()


def test_beside_steps_only_blocks_that_are_near_are_backed(monkeypatch) -> None:
    ahead = 4
    monkeypatch.setattr(prefault, "_AT_ONCE_BYTES", ahead * _LAYERS * _BLOCK_BYTES)
    monkeypatch.setattr(prefault._Steps, "end_s", math.inf)  # within a step
    looked = threading.Semaphore(0)
    going_on = threading.Semaphore(0)

    class Clock:
        @staticmethod
        def sleep(seconds: float) -> None:
            looked.release()
            going_on.acquire()

        @staticmethod
        def monotonic() -> float:
            return 0.0

    monkeypatch.setattr(prefault, "time", Clock)
    _memory, layers = _layers()
    found = Prefault(layers)
    looked.acquire()  # the thread waits: what was backed is a first part, and what lies ahead
    per_block = _LAYERS * _BLOCK_BYTES
    room = HUGE_PAGE_BYTES * (_LAYERS + 1)  # the system may round pieces up
    assert ahead * per_block <= _num_backed_bytes(layers) <= (ahead + 2) * per_block + room
    found.step_begins(num_used=8)
    going_on.release()
    looked.acquire()  # further, and waiting again
    assert (8 + ahead) * per_block <= _num_backed_bytes(layers)
    assert _num_backed_bytes(layers) <= (8 + ahead + 2) * per_block + room
    assert not found.is_done
    assert not found.wait(0.0)
    found.step_begins(num_used=_BLOCKS)  # a draft model's spare blocks, at the end
    going_on.release()
    looked.acquire()
    assert _num_backed_bytes(layers) <= (8 + ahead + 2) * per_block + room
    for num_used in (14, 20, 26):
        found.step_begins(num_used)
        going_on.release()
        if num_used < 26:
            looked.acquire()
    assert found.wait(30)
    assert _num_backed_bytes(layers) >= layers.numel()


def test_an_engine_without_steps_is_idle(monkeypatch) -> None:
    monkeypatch.setattr(prefault, "_AT_ONCE_BYTES", _LAYERS * _BLOCK_BYTES)
    _memory, layers = _layers()
    found = Prefault(layers)
    found.step_begins(num_used=1)
    found.step_ends()
    assert found.wait(30)
    assert _num_backed_bytes(layers) >= layers.numel()


def test_where_the_system_cannot_it_ends(monkeypatch) -> None:
    monkeypatch.setattr(prefault, "_MADV_POPULATE_WRITE", 9999)
    _memory, layers = _layers()
    assert Prefault(layers).is_done
    assert _num_backed_bytes(layers) < layers.numel()
