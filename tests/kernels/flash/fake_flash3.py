"""FlashAttention-3's two functions as its source describes them, in float64 on any device.

Refuses what the library refuses (dtypes, head dimension, index types, contiguity, shapes, a
schedule of another size), and beside that a schedule that is not the call's own, which the library
would follow into wrong results. Host code runs as while a graph is captured: only what stands for
the device's work reads tensors. Rows of no slice stay NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch.utils._python_dispatch import _disable_current_modes

from kernels.flash.library import Flash3Library
from tests.kernels.flash.fake_flash_attn import attend, require


@dataclass
class FakeFlash3:
    """calls: the host's arguments of every call, with the numbers of tokens and slices.
    schedules: those of every schedule. lengths: of queries, for every call."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    schedules: list[dict[str, Any]] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)

    @property
    def library(self) -> Flash3Library:
        return Flash3Library(self.with_kvcache, self.schedule)

    def with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        scheduler_metadata: torch.Tensor,
        num_splits: int,
    ) -> torch.Tensor:
        require(q.dtype in (torch.float16, torch.bfloat16), "only fp16 and bf16 are supported")
        require(q.dtype == k_cache.dtype == v_cache.dtype, "dtypes of q, k and v must be the same")
        for x in (q, k_cache, v_cache, page_table):
            require(x.stride(-1) == 1, "the last dimension must be contiguous")
        require(q.dim() == 3, "q must be (total tokens, heads, head dim)")
        require(k_cache.dim() == 4 and k_cache.shape == v_cache.shape, "caches must be paged")
        (tokens, heads, dim), (_, page, kv_heads, _) = q.shape, k_cache.shape
        require(dim == k_cache.shape[3] and dim <= 256 and dim % 8 == 0, "head dimension")
        require(page_table.dtype == torch.int32, "page_table must be int32")
        require(page_table.dim() == 2, "page_table must be (batch, pages)")
        batch, width = page_table.shape
        call = {
            "batch_size": batch,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": width * page,
            "num_heads_q": heads,
            "num_heads_kv": kv_heads,
            "headdim": dim,
            "qkv_dtype": q.dtype,
            "page_size": page,
            "causal": causal,
            "window_size": window_size,
            "has_softcap": softcap > 0,
            "num_splits": num_splits,
        }
        expected = _schedule(call, cache_seqlens, cu_seqlens_q)
        given = scheduler_metadata
        require(given.dtype == torch.int32, "scheduler_metadata must be int32")
        require(given.is_contiguous(), "scheduler_metadata must be contiguous")
        require(given.shape == expected.shape, "scheduler_metadata has another size")
        self.calls.append({**call, "tokens": tokens, "softcap": softcap, "scale": softmax_scale})
        with _disable_current_modes():
            require(given.tolist() == expected.tolist(), "the schedule is of other arguments")
            starts, kv_lengths = cu_seqlens_q.tolist(), cache_seqlens.tolist()
            self.lengths.append(cu_seqlens_q.diff().tolist())
            require(starts[0] == 0 and starts[-1] <= tokens, "cu_seqlens_q")
            require(max(self.lengths[-1]) <= max_seqlen_q, "max_seqlen_q is too small")
            require(max(kv_lengths) <= width * page, "cache_seqlens exceeds the table")
            out = torch.full_like(q, torch.nan)
            for b in range(batch):
                rows = slice(starts[b], starts[b + 1])
                out[rows] = attend(
                    q[rows], k_cache, v_cache, page_table[b], kv_lengths[b], softmax_scale, causal,
                    window_size, softcap,
                )  # fmt: skip
        return out

    def schedule(
        self, *, cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor, **call: Any
    ) -> torch.Tensor:
        self.schedules.append(call)
        return _schedule(call, cache_seqlens, cu_seqlens_q)


def _schedule(
    call: dict[str, Any], cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor
) -> torch.Tensor:
    """Of the library's size, and unlike that of any other arguments."""
    batch = call["batch_size"]
    for name, values, size in (
        ("cache_seqlens", cache_seqlens, batch),
        ("cu_seqlens_q", cu_seqlens_q, batch + 1),
    ):
        require(values.dtype == torch.int32, f"{name} must be int32")
        require(values.is_contiguous(), f"{name} must be contiguous")
        require(values.shape == (size,), f"{name} must have {size} entries")
    require(call["num_heads_q"] % call["num_heads_kv"] == 0, "heads")
    require(0 <= call["num_splits"] <= 256, "num_splits > 256 not supported")
    window, capacity = call["window_size"][0], call["max_seqlen_k"]
    local = 0 <= window < capacity - 1
    vectors = 3 if local else 4  # whole batches are sorted; each is padded to 16 bytes
    schedule = torch.zeros(vectors * (-(-batch // 4) * 4) + 1, dtype=torch.int32)
    schedule = schedule.to(cache_seqlens.device)
    schedule[:batch] = cu_seqlens_q.diff()
    schedule[batch : 2 * batch] = cache_seqlens
    schedule[2 * batch] = crc32(repr(sorted(call.items())).encode()) >> 1
    return schedule
