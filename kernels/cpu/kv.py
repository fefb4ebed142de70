"""The CPU backend's paged KV cache: one byte tensor per layer.

Its layout is described in src/attention_layout.h; Python only moves whole blocks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu import library
from kernels.cpu.library import DTYPE_CODES
from kernels.interface import AttentionShape, KVLayer

_HUGE_PAGE_BYTES = 2 << 20
_PREFAULTED_AT_ONCE_BYTES = 128 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_PREFAULT_THREAD = "legato-prefault-kv"  # name of the prefaulting threads


class ShapeView(ctypes.Structure):
    """An AttentionShape with the cache's block size and types (src/attention_layout.h)."""

    _fields_ = (
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
        ("sliding_window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
    )


@dataclass(slots=True)
class CpuKVLayer:
    """data: (num_blocks, bytes of a block), uint8. dtype int8 stores a float scale per token and
    head, for K and V each, beside the values."""

    data: torch.Tensor
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


def block_bytes(block_size: int, shape: AttentionShape, dtype: torch.dtype) -> int:
    """Bytes of one block of one layer."""
    check_shape(shape)
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    measure = library.function("legato_kv_block_bytes", ctypes.c_int64, *[ctypes.c_int32] * 4)
    return int(measure(dtype_code(dtype), block_size, shape.num_kv_heads, shape.head_dim))


def allocate(
    num_layers: int, num_blocks: int, block_size: int, shape: AttentionShape, dtype: torch.dtype
) -> list[CpuKVLayer]:
    """Zeroed layers in one mapping, on huge pages where the system grants them: decode steps read
    the cache block by block, and small pages would miss the TLB at each.

    Memory is prefaulted, the first blocks at once and the rest by a thread that only takes idle
    cores: the first write to a block takes a page fault per layer (a step of 30 ms then takes 200).
    Raises ValueError for a shape or block size without a kernel.
    """
    size = block_bytes(block_size, shape, dtype)
    total = num_layers * num_blocks * size
    memory = mmap.mmap(-1, max(total, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if total >= _HUGE_PAGE_BYTES:
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8, count=total)
    layers = data.view(num_layers, num_blocks, size)
    num_first = min(num_blocks, _PREFAULTED_AT_ONCE_BYTES // (num_layers * size))
    _prefault(layers[:, :num_first])
    if num_first < num_blocks:
        rest = layers[:, num_first:]
        threading.Thread(
            target=_prefault_when_idle, args=(rest,), name=_PREFAULT_THREAD, daemon=True
        ).start()
    return [
        CpuKVLayer(layer, block_size, shape.num_kv_heads, shape.head_dim, dtype) for layer in layers
    ]


def wait_until_prefaulted() -> None:
    """Block until every cache of this process is backed by memory; earlier steps are slower."""
    for thread in threading.enumerate():
        if thread.name == _PREFAULT_THREAD:
            thread.join()


def _prefault_when_idle(layers: torch.Tensor) -> None:
    # Clearing gigabytes takes seconds, and longer on virtual machines: decode steps take
    # precedence.
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    _prefault(layers)


def _prefault(layers: torch.Tensor) -> None:
    """Back these blocks with memory, in the order of their use; contents are kept.

    layers: (num_layers, num_blocks, bytes of a block). Without MADV_POPULATE_WRITE (Linux before
    5.14) pages are faulted in on first use.
    """
    advise = ctypes.CDLL(None).madvise  # ctypes releases the GIL, `mmap.madvise` does not
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    num_layers, num_blocks, size = layers.shape
    step = max(1, _HUGE_PAGE_BYTES // size)
    for begin in range(0, num_blocks, step):
        num_bytes = (min(begin + step, num_blocks) - begin) * size
        for layer in range(num_layers):
            address = layers[layer, begin].data_ptr()
            page = address % mmap.PAGESIZE
            if advise(address - page, num_bytes + page, _MADV_POPULATE_WRITE):
                return


def copy_blocks(layers: Sequence[KVLayer], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block `source` to `destination` in every layer, pair by pair in order."""
    if not pairs:
        return
    checked = [as_cpu_layer(layer) for layer in layers]
    blocks = torch.tensor(pairs, dtype=torch.int64)
    for layer in checked:
        if int(blocks.min()) < 0 or int(blocks.max()) >= layer.data.shape[0]:
            raise IndexError(f"block pairs {pairs} lie outside a cache of {layer.data.shape[0]}")
    copy = library.function(
        "legato_copy_blocks",
        None,
        library.Pointer,
        ctypes.c_int64,
        ctypes.c_int64,
        library.Pointer,
        ctypes.c_int64,
    )
    addresses = torch.tensor([layer.data.data_ptr() for layer in checked], dtype=torch.int64)
    size = checked[0].data.shape[1] if checked else 0
    copy(addresses.data_ptr(), len(checked), size, blocks.data_ptr(), len(pairs))


def read_block(layer: KVLayer, block: int) -> torch.Tensor:
    """A copy of one block's bytes."""
    return as_cpu_layer(layer).data[block].clone()


def write_block(layer: KVLayer, block: int, data: torch.Tensor) -> None:
    """Restore what `read_block` returned for a cache of the same shape. Raises ValueError for other
    bytes."""
    target = as_cpu_layer(layer).data[block]
    if data.dtype != torch.uint8 or data.shape != target.shape:
        raise ValueError(
            f"a block of this cache is {target.shape[0]} bytes, "
            f"not {tuple(data.shape)} of {data.dtype}"
        )
    target.copy_(data)


def view_shape(shape: AttentionShape, layer: CpuKVLayer, dtype: torch.dtype) -> ShapeView:
    """dtype: of the activations. Valid while the shape's tensors live."""
    check_shape(shape)
    if (layer.num_kv_heads, layer.head_dim) != (shape.num_kv_heads, shape.head_dim):
        raise ValueError(
            f"the cache holds {layer.num_kv_heads} heads of {layer.head_dim}, "
            f"the shape asks for {shape.num_kv_heads} of {shape.head_dim}"
        )
    return ShapeView(
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        layer.block_size,
        dtype_code(dtype),
        dtype_code(layer.dtype),
        shape.sliding_window or 0,
        shape.scale,
        shape.softcap or 0.0,
        library.pointer(shape.sinks_N),
    )


def as_cpu_layer(layer: KVLayer) -> CpuKVLayer:
    """The layer itself. Raises TypeError if another backend allocated it."""
    if not isinstance(layer, CpuKVLayer):
        raise TypeError(f"the cpu backend was given a cache of {type(layer).__name__}")
    return layer


def dtype_code(dtype: torch.dtype) -> int:
    """Code of a dtype in the library. Raises TypeError for one that it lacks."""
    code = DTYPE_CODES.get(dtype)
    if code is None:
        known = ", ".join(str(known) for known in DTYPE_CODES)
        raise TypeError(f"the cpu backend cannot store {dtype}; it supports {known}")
    return code


def check_shape(shape: AttentionShape) -> None:
    """Raise ValueError, naming the field, for a shape without a kernel."""
    if shape.head_dim % 8 or not 8 <= shape.head_dim <= 1024:
        raise ValueError(f"head_dim must be a multiple of 8 up to 1024, not {shape.head_dim}")
    if shape.num_kv_heads < 1 or shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"num_heads {shape.num_heads} is not a multiple of num_kv_heads {shape.num_kv_heads}"
        )
    if not shape.scale > 0:
        raise ValueError(f"scale must be positive, not {shape.scale}")
    if shape.sliding_window is not None and shape.sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, not {shape.sliding_window}")
    if shape.softcap is not None and not shape.softcap > 0:
        raise ValueError(f"softcap must be positive, not {shape.softcap}")
    sinks_N = shape.sinks_N
    if sinks_N is not None and (
        sinks_N.shape != (shape.num_heads,)
        or sinks_N.dtype != torch.float32
        or not sinks_N.is_contiguous()
    ):
        raise ValueError(f"sinks_N must be {shape.num_heads} contiguous values of float32")
