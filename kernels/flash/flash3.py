"""A hybrid batch in one call of FlashAttention-3.

The library divides the work on the device: its schedule says how many parts the KV of a slice is
cut into, given all lengths, and programs take tiles by a counter. Nothing that the host passes
depends on lengths, so that any batch can be captured in a CUDA graph."""

from __future__ import annotations

import torch

from kernels.flash.hybrid import window_of
from kernels.flash.library import Flash3Library
from kernels.interface import AttentionShape, Batch
from kernels.triton.cache import PagedKV

# A slice alone is cut into as many parts as fill the GPU (Hoppers have 114 to 132 multiprocessors);
# beside others into fewer. More parts than programs would never be used.
_MOST_PROGRAMS = 128
# The library allocates float32 outputs of all tokens for every part that is allowed. Batches of
# many tokens are allowed few: their tiles fill the GPU.
_SPLIT_BYTES = 128 << 20


class Flash3Attention:
    """Attention of all layers, with what is derived once from a batch.

    A batch to be captured must be a new object: what is derived is then computed inside the graph.
    """

    def __init__(self, flash: Flash3Library) -> None:
        self._flash = flash
        self._batch: Batch | None = None
        self._lengths_S = torch.empty(0)  # int32, of KV
        self._schedules: dict[AttentionShape, torch.Tensor] = {}

    def __call__(
        self, q_TND: torch.Tensor, batch: Batch, layer: PagedKV, shape: AttentionShape
    ) -> torch.Tensor:
        """(T, N, D). Rows of padding tokens (captured batches) are undefined."""
        if self._batch is not batch:
            self._batch, self._schedules = batch, {}
            self._lengths_S = batch.starts_S + batch.lengths_S
        # What the schedule is computed from must be what the call is given.
        common = {
            "cache_seqlens": self._lengths_S,
            "cu_seqlens_q": batch.query_starts_S1,
            "max_seqlen_q": batch.max_length,
            "causal": True,
            "window_size": window_of(shape, batch),
            "num_splits": most_splits(q_TND, shape.num_kv_heads),
        }
        schedule = self._schedules.get(shape)
        if schedule is None:
            block_size = layer.block_size
            schedule = self._flash.schedule(
                batch_size=len(batch.starts_S),
                # As the call: what the tables can hold, not the longest context.
                max_seqlen_k=batch.block_tables_SB.shape[1] * block_size,
                num_heads_q=shape.num_heads,
                num_heads_kv=shape.num_kv_heads,
                headdim=shape.head_dim,
                qkv_dtype=q_TND.dtype,
                page_size=block_size,
                has_softcap=bool(shape.softcap),
                **common,
            )
            self._schedules[shape] = schedule
        return self._flash.with_kvcache(
            q_TND,
            layer.keys,
            layer.values,
            page_table=batch.block_tables_SB,
            softmax_scale=shape.scale,
            softcap=shape.softcap or 0.0,
            scheduler_metadata=schedule,
            **common,
        )


def most_splits(q_TND: torch.Tensor, num_kv_heads: int) -> int:
    """The most parts that the KV of a slice may be cut into."""
    return max(1, min(_MOST_PROGRAMS // num_kv_heads, _SPLIT_BYTES // (4 * q_TND.numel())))
