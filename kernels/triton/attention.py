"""Causal paged attention of a hybrid batch: one kernel for decodes, one for prefill chunks."""

from __future__ import annotations

import torch

from kernels.interface import AttentionShape, Batch
from kernels.triton.cache import PagedKV
from kernels.triton.decode import decode_attention
from kernels.triton.prefill import prefill_attention, tile_of
from kernels.triton.work_list import WorkLists


def attention(
    q_TND: torch.Tensor, batch: Batch, layer: PagedKV, shape: AttentionShape, lists: WorkLists
) -> torch.Tensor:
    """(T, N * D). Rows of padding tokens (captured batches) are undefined."""
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
    if decode_slots:
        work = lists.of(batch, decode_slots, shape, q_TND.dtype)
        decode_attention(q_TND, out_TND, batch, layer, shape, work)
    if has_chunks:
        tokens = tile_of(shape, q_TND.dtype).tokens
        tiles = lists.tiles_of(batch, T, first_chunk, decode_slots, tokens)
        prefill_attention(q_TND, out_TND, batch, layer, shape, tiles)
    return out_TND.view(T, N * D)
