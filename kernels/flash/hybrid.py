"""Two ways to compute a hybrid batch with flash-attn, and the crossover between them.

One call: every slice is a sequence of one varlen call, a decode being a sequence of one query. It
neither splits the KV range nor packs query heads, so a long decode is one slow program, hidden only
while prefill tiles run beside it. Two calls: chunks by varlen, decodes by the split-KV kernel,
which streams KV at full bandwidth but starts only after the first call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kernels.flash.library import PAGE_MULTIPLE, FlashLibrary
from kernels.interface import AttentionShape, Batch
from kernels.triton.cache import PagedKV, allocate, block_bytes
from kernels.typical_batch import decodes_within, layers_within, typical_batch

_log = logging.getLogger(__name__)

# Measured batches: one chunk and some decodes, the paper's typical hybrid iteration; fewer decodes
# where their contexts would take more memory.
_CHUNK = 512
_DECODES = 32
_CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
_MOST_LAYERS = 4


@dataclass(frozen=True, slots=True)
class SeqLens:
    """int32 lengths on the device, computed once per batch: those of KV, (S,), and cumulative from
    0, (S + 1,). chunks: cumulative lengths of queries and of KV behind the decodes, from 0."""

    seqlens_k: torch.Tensor
    cu_seqlens_k: torch.Tensor
    chunks: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, batch: Batch) -> SeqLens:
        lengths_S = batch.starts_S + batch.lengths_S
        starts_S1 = torch.zeros_like(batch.query_starts_S1)
        torch.cumsum(lengths_S, 0, dtype=torch.int32, out=starts_S1[1:])
        count = batch.num_decodes
        chunks = (batch.query_starts_S1, starts_S1)
        if count and batch.max_length > 1 and not batch.captured:
            # Each of the slices before is a decode, one token.
            chunks = (batch.query_starts_S1[count:] - count, starts_S1[count:] - starts_S1[count])
        return cls(lengths_S, starts_S1, chunks)


def one_call(
    flash: FlashLibrary,
    q_TND: torch.Tensor,
    batch: Batch,
    lengths: SeqLens,
    layer: PagedKV,
    shape: AttentionShape,
    first: int = 0,
) -> torch.Tensor:
    """All slices by varlen, or (first) those behind the decodes; q_TND holds their tokens only
    -> (T, N, D)."""
    query_starts, cu_seqlens_k = batch.query_starts_S1, lengths.cu_seqlens_k
    if first:
        query_starts, cu_seqlens_k = lengths.chunks
    return flash.varlen(
        q_TND,
        layer.keys,
        layer.values,
        cu_seqlens_q=query_starts,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=batch.max_length,
        max_seqlen_k=batch.max_kv_length,
        softmax_scale=shape.scale,
        causal=True,
        window_size=window_of(shape, batch),
        softcap=shape.softcap or 0.0,
        block_table=batch.block_tables_SB[first:],
    )


def split_kv(
    flash: FlashLibrary,
    q_SND: torch.Tensor,
    batch: Batch,
    lengths: SeqLens,
    layer: PagedKV,
    shape: AttentionShape,
) -> torch.Tensor:
    """The leading one-token slices by split-KV -> (S, N, D)."""
    count = q_SND.shape[0]
    out_S1ND = flash.with_kvcache(
        q_SND.unsqueeze(1),
        layer.keys,
        layer.values,
        cache_seqlens=lengths.seqlens_k[:count],
        block_table=batch.block_tables_SB[:count],
        softmax_scale=shape.scale,
        causal=True,
        window_size=window_of(shape, batch),
        softcap=shape.softcap or 0.0,
    )
    return out_S1ND.squeeze(1)


def two_calls(
    flash: FlashLibrary,
    q_TND: torch.Tensor,
    batch: Batch,
    lengths: SeqLens,
    layer: PagedKV,
    shape: AttentionShape,
) -> torch.Tensor:
    """Decodes by split-KV, the rest by varlen -> (T, N, D)."""
    count = batch.num_decodes
    decoded = split_kv(flash, q_TND[:count], batch, lengths, layer, shape)
    return torch.cat((decoded, one_call(flash, q_TND[count:], batch, lengths, layer, shape, count)))


def window_of(shape: AttentionShape, batch: Batch) -> tuple[int, int]:
    """(left, right) tokens beside the token itself; -1: unlimited.

    A window that holds every context is none: with one, flash-attn reads K and V once per query
    head."""
    if shape.sliding_window is None or batch.max_kv_length <= shape.sliding_window:
        return (-1, -1)
    return (shape.sliding_window - 1, 0)


def measure_crossover(
    flash: FlashLibrary,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    time_s: Callable[[Sequence[Callable[[], object]]], float],
) -> int:
    """The longest decode context for which one call is at least as fast as two.

    time_s: device seconds per call, given the same call over several layers. Decided once, before
    serving, so that equal batches always take the same path.
    """
    crossover = 0
    for context in _CONTEXTS:
        once, twice = _times_s(flash, shape, dtype, device, context, time_s)
        _log.debug("flash-attn, context %d: one call %.6f s, two %.6f s", context, once, twice)
        if once > twice:
            break
        crossover = context
    return crossover


def _times_s(
    flash: FlashLibrary,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    time_s: Callable[[Sequence[Callable[[], object]]], float],
) -> tuple[float, float]:
    """Times of a batch in one call and in two."""
    one_block = block_bytes(PAGE_MULTIPLE, shape, dtype)
    num_decodes = decodes_within(_DECODES, context, PAGE_MULTIPLE, one_block)
    batch, num_blocks = typical_batch(num_decodes, context, _CHUNK, PAGE_MULTIPLE, device)
    num_layers = layers_within(_MOST_LAYERS, num_blocks, one_block)
    layers = allocate(num_layers, num_blocks, PAGE_MULTIPLE, shape, dtype, device)
    for layer in layers:
        layer.keys.normal_()
        layer.values.normal_()
    lengths = SeqLens.of(batch)
    size = (num_decodes + _CHUNK, shape.num_heads, shape.head_dim)
    q_TND = torch.randn(size, dtype=dtype, device=device)
    calls = [(flash, q_TND, batch, lengths, layer, shape) for layer in layers]
    once = time_s([partial(one_call, *arguments) for arguments in calls])
    return once, time_s([partial(two_calls, *arguments) for arguments in calls])
