"""Batches and shapes as the C++ side sees them (src/attention_layout.h: BatchView, ShapeView)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.kv import CpuKVLayer, check_shape, dtype_code
from kernels.interface import AttentionShape, Batch


class BatchView(ctypes.Structure):
    """Addresses of a Batch's tensors; valid while they live."""

    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("num_slices", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
    )


class ShapeView(ctypes.Structure):
    """An AttentionShape with the cache's block size and types."""

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
    )


def view_batch(batch: Batch, block_size: int) -> BatchView:
    """Checks what would read or write out of bounds, in O(1)."""
    num_slices = batch.starts_S.shape[0]
    num_tokens = batch.positions_T.shape[0]
    table_width = batch.block_tables_SB.shape[1] if batch.block_tables_SB.dim() == 2 else -1
    expected = (
        ("positions_T", batch.positions_T, (num_tokens,)),
        ("query_starts_S1", batch.query_starts_S1, (num_slices + 1,)),
        ("starts_S", batch.starts_S, (num_slices,)),
        ("lengths_S", batch.lengths_S, (num_slices,)),
        ("block_tables_SB", batch.block_tables_SB, (num_slices, table_width)),
        ("slot_mapping_T", batch.slot_mapping_T, (num_tokens,)),
    )
    for name, tensor, size in expected:
        if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"batch.{name} must be a contiguous int32 tensor on the CPU")
        if tensor.shape != size:
            raise ValueError(f"batch.{name} has shape {tuple(tensor.shape)}, expected {size}")
    if batch.max_kv_length > table_width * block_size:
        raise ValueError(
            f"block tables of {table_width} blocks of {block_size} tokens cannot hold "
            f"{batch.max_kv_length}"
        )
    return BatchView(*(tensor.data_ptr() for _, tensor, _ in expected), num_tokens, num_slices,
                     table_width)  # fmt: skip


def view_shape(shape: AttentionShape, layer: CpuKVLayer, dtype: torch.dtype) -> ShapeView:
    """dtype: of the activations."""
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
    )
