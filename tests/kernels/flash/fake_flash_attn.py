"""flash-attn's two functions as its documentation describes them, in float64 on any device.

Refuses what the library refuses (2.8.3: dtypes, head dimension, page size, contiguity, index
types) and records the shapes of every call, so that the way we use it is tested without a GPU.
Causal masks are aligned to the bottom right: the last query sees the whole context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kernels.flash.library import FlashLibrary


@dataclass
class FakeFlash:
    """calls: (function, number of sequences, longest query) of every call."""

    calls: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def library(self) -> FlashLibrary:
        return FlashLibrary(self.varlen, self.with_kvcache)

    def varlen(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        require(q.dim() == 3, "q must be (total tokens, heads, head dim)")
        _check(q, k, v, block_table)
        batch = len(block_table)
        for name, values in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            require(values.dtype == torch.int32, f"{name} must be int32")
            require(values.is_contiguous(), f"{name} must be contiguous")
            require(values.shape == (batch + 1,), f"{name} must have batch + 1 entries")
        require(int(cu_seqlens_q[-1]) == len(q), "cu_seqlens_q must end at the number of tokens")
        starts, seqlens_k = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
        longest = int(cu_seqlens_q.diff().max())
        require(starts[0] == 0 and int(cu_seqlens_k[0]) == 0, "cumulative lengths start at 0")
        require(longest <= max_seqlen_q, "max_seqlen_q is too small")
        require(max(seqlens_k) <= max_seqlen_k, "max_seqlen_k is too small")
        self.calls.append(("varlen", batch, longest))
        out = torch.empty_like(q)
        for b in range(batch):
            rows = slice(starts[b], starts[b + 1])
            out[rows] = attend(
                q[rows], k, v, block_table[b], seqlens_k[b], softmax_scale, causal,
                window_size, softcap,
            )  # fmt: skip
        return out

    def with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> torch.Tensor:
        require(q.dim() == 4, "q must be (batch, tokens, heads, head dim)")
        _check(q, k_cache, v_cache, block_table)
        require(cache_seqlens.dtype == torch.int32, "cache_seqlens must be int32")
        require(cache_seqlens.is_contiguous(), "cache_seqlens must be contiguous")
        require(len(q) == len(block_table) == len(cache_seqlens), "batches differ")
        self.calls.append(("with_kvcache", len(q), q.shape[1]))
        out = torch.empty_like(q)
        for b, length in enumerate(cache_seqlens.tolist()):
            out[b] = attend(
                q[b], k_cache, v_cache, block_table[b], length, softmax_scale, causal,
                window_size, softcap,
            )  # fmt: skip
        return out


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor) -> None:
    require(q.dtype in (torch.float16, torch.bfloat16), "only fp16 and bf16 are supported")
    require(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    for x in (q, k, v):
        require(x.stride(-1) == 1, "the last dimension must be contiguous")
    require(k.dim() == 4 and k.shape == v.shape, "caches must be (blocks, page, kv heads, dim)")
    require(k.shape[1] % 256 == 0, "paged KV cache block size must be divisible by 256")
    require(q.shape[-1] <= 256 and q.shape[-1] % 8 == 0, "head dimension")
    require(q.shape[-2] % k.shape[2] == 0, "heads must be a multiple of kv heads")
    require(block_table.dtype == torch.int32, "block_table must be int32")
    require(block_table.stride(-1) == 1, "block_table's last dimension must be contiguous")


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    kv_length: int,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    if not kv_length:
        return torch.zeros_like(q)
    group = q.shape[1] // k_cache.shape[2]
    blocks = table[: -(-kv_length // k_cache.shape[1])].long()
    k = k_cache[blocks].flatten(0, 1)[:kv_length].double().repeat_interleave(group, 1)
    v = v_cache[blocks].flatten(0, 1)[:kv_length].double().repeat_interleave(group, 1)
    scores = torch.einsum("tnd,knd->ntk", q.double(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    distance = (torch.arange(len(q)) + kv_length - len(q))[:, None] - torch.arange(kv_length)
    sees = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window[0] >= 0:
        sees &= distance <= window[0]
    if window[1] >= 0:
        sees &= -distance <= window[1]
    scores = scores.masked_fill(~sees.to(scores.device), -math.inf)
    return torch.einsum("ntk,knd->tnd", scores.softmax(-1), v).to(q.dtype)
