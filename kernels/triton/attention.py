"""Causal paged attention of a hybrid batch: decodes and prefill chunks in a launch each, or in one.

Both ways give the same bits. Which is faster depends on the GPU and the shape, and is measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from kernels.interface import AttentionShape, Batch
from kernels.triton.cache import FLOAT8, PagedKV, allocate, block_bytes
from kernels.triton.decode import decode_attention
from kernels.triton.hybrid import fits, hybrid_attention
from kernels.triton.prefill import prefill_attention, tile_of
from kernels.triton.work_list import WorkLists
from kernels.typical_batch import typical_batch

_log = logging.getLogger(__name__)

# The measured batch, about a step of 50 ms of an 8B model on an H100; fewer decodes where their
# contexts would take more memory.
_CHUNK = 1984
_DECODES = 64
_CONTEXT = 1023
_MOST_BYTES = 1 << 29
_MOST_LAYERS = 8  # used in turn: a small one would stay in the L2 cache


def attention(
    q_TND: torch.Tensor,
    batch: Batch,
    layer: PagedKV,
    shape: AttentionShape,
    lists: WorkLists,
    one_launch: bool,
) -> torch.Tensor:
    """(T, N * D). Rows of padding tokens (captured batches) are undefined.

    one_launch: for decodes and chunks, where the shape allows it.
    """
    T, N, D = q_TND.shape
    S = batch.starts_S.shape[0]
    out_TND = torch.empty_like(q_TND)
    if not T:
        return out_TND.view(T, N * D)
    if batch.captured:
        # Lengths change between replays of a captured launch: any slice may become a decode.
        decode_slots, first_chunk = batch.num_decodes, 0
        has_chunks = batch.max_length > 1
    else:
        decode_slots = first_chunk = batch.num_decodes
        has_chunks = batch.num_decodes < S
    work, tiles = None, None
    if decode_slots:
        work = lists.of(batch, decode_slots, shape, q_TND.dtype)
    if has_chunks:
        tokens = tile_of(shape, q_TND.dtype).tokens
        tiles = lists.tiles_of(batch, T, first_chunk, decode_slots, tokens)
    if one_launch and work and tiles and fits(shape, q_TND.dtype):
        hybrid_attention(q_TND, out_TND, batch, layer, shape, work, tiles)
        return out_TND.view(T, N * D)
    if work:
        decode_attention(q_TND, out_TND, batch, layer, shape, work)
    if tiles:
        prefill_attention(q_TND, out_TND, batch, layer, shape, tiles)
    return out_TND.view(T, N * D)


def one_launch_is_faster(
    shape: AttentionShape,
    kv_dtype: torch.dtype,
    block_size: int,
    device: torch.device,
    time_s: Callable[[Sequence[Callable[[], object]]], float],
) -> bool:
    """Whether a typical hybrid batch takes less time in one launch than in two.

    time_s: device seconds per call, given the same call over several layers.
    """
    dtype = torch.bfloat16 if kv_dtype == FLOAT8 else kv_dtype
    if not fits(shape, dtype):
        return False
    shape = replace(shape, sinks_N=None, alibi_NP=None)  # of a layer, and of as many positions
    one_block = block_bytes(block_size, shape, kv_dtype)
    context_bytes = -(-(_CONTEXT + 1) // block_size) * one_block
    num_decodes = max(1, min(_DECODES, _MOST_BYTES // context_bytes))
    batch, num_blocks = typical_batch(num_decodes, _CONTEXT, _CHUNK, block_size, device)
    num_layers = max(1, min(_MOST_LAYERS, _MOST_BYTES // (num_blocks * one_block)))
    layers = allocate(num_layers, num_blocks, block_size, shape, kv_dtype, device)
    for layer in layers:  # products of zeros run faster than others
        for stored in (layer.keys, layer.values):
            _ = stored.random_(0, 0x7F) if layer.is_float8 else stored.normal_()
    size = (num_decodes + _CHUNK, shape.num_heads, shape.head_dim)
    q_TND = torch.randn(size, device=device).to(dtype)
    lists = WorkLists()
    two_s, one_s = (
        time_s([partial(attention, q_TND, batch, x, shape, lists, one_launch) for x in layers])
        for one_launch in (False, True)
    )
    _log.info(
        "attention of %d tokens beside %d decodes: %.0f us a layer in one launch, %.0f in two",
        _CHUNK, num_decodes, 1e6 * one_s, 1e6 * two_s,
    )  # fmt: skip
    return one_s < two_s
