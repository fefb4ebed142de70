"""The CPU backend's paged KV cache: one byte tensor per layer.

Its layout is described in src/attention_layout.h; Python only moves whole blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu import library
from kernels.cpu.library import DTYPE_CODES
from kernels.cpu.prefault import Prefault
from kernels.huge_pages import map_zeros
from kernels.interface import AttentionShape, KVLayer


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
        ("alibi", ctypes.c_void_p),
        ("alibi_stride", ctypes.c_int64),
        ("norms_last", ctypes.c_bool),
    )


@dataclass(slots=True)
class CpuKVLayer:
    """data: (num_blocks, bytes of a block), uint8. dtype int8 stores a float scale per token and
    head, for K and V each, beside the values. prefault: of all layers of the cache."""

    data: torch.Tensor
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    prefault: Prefault


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
    """Zeroed layers in one mapping, on huge pages: decode steps read the cache block by block.

    Raises ValueError for a shape or block size without a kernel.
    """
    size = block_bytes(block_size, shape, dtype)
    total = num_layers * num_blocks * size
    layers = map_zeros(total).view(num_layers, num_blocks, size)
    prefault = Prefault(layers)
    return [
        CpuKVLayer(layer, block_size, shape.num_kv_heads, shape.head_dim, dtype, prefault)
        for layer in layers
    ]


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


def view_shape(
    shape: AttentionShape, layer: CpuKVLayer, dtype: torch.dtype, max_kv_length: int = 0
) -> ShapeView:
    """dtype: of the activations. Valid while the shape's tensors live. Raises ValueError for a
    shape without a kernel, or whose position biases do not cover max_kv_length positions."""
    check_shape(shape)
    positions = 0 if shape.alibi_NP is None else shape.alibi_NP.shape[1]
    if shape.alibi_NP is not None and max_kv_length > positions:
        raise ValueError(f"position {max_kv_length - 1} lies past the {positions} of alibi_NP")
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
        shape.window_code,
        shape.scale,
        shape.softcap or 0.0,
        library.pointer(shape.sinks_N),
        library.pointer(shape.alibi_NP),
        positions,
        shape.norms_last,
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


def unsupported_head_dim(head_dim: int) -> str | None:
    """Why no kernel has heads of this size; None where one has."""
    if head_dim % 8 or not 8 <= head_dim <= 1024:
        return f"head_dim must be a multiple of 8 up to 1024, not {head_dim}"
    return None


def check_shape(shape: AttentionShape) -> None:
    """Raise ValueError, naming the field, for a shape without a kernel."""
    if problem := unsupported_head_dim(shape.head_dim):
        raise ValueError(problem)
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
    alibi_NP = shape.alibi_NP
    if alibi_NP is not None and (
        alibi_NP.dim() != 2
        or len(alibi_NP) != shape.num_heads
        or alibi_NP.dtype != torch.float32
        or not alibi_NP.is_contiguous()
    ):
        raise ValueError(f"alibi_NP must be {shape.num_heads} contiguous rows of float32")
