"""Q/K norm, rotary embedding and the KV write, in one pass over the fused QKV projection."""

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionShape, Batch
from kernels.triton.cache import PagedKV
from kernels.triton.float8 import to_e4m3

# Heads of one token per program: enough lanes for four warps, and still several programs when the
# batch is a single token.
_HEADS_PER_PROGRAM = 8


@triton.jit
def _normed(
    first: tl.tensor,
    second: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    in_q: tl.tensor,
    in_k: tl.tensor,
    i: tl.tensor,
    eps: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The RMS norm of the rows of q and k; others stay."""
    squares = tl.sum(first * first + second * second, 1)
    inverse_rms = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    zeros = tl.zeros_like(first).to(tl.int32) + i
    weight_1 = tl.load(q_norm_ptr + zeros, mask=in_q, other=0.0).to(tl.float32)
    weight_1 += tl.load(k_norm_ptr + zeros, mask=in_k, other=0.0).to(tl.float32)
    weight_2 = tl.load(q_norm_ptr + zeros + HALF, mask=in_q, other=0.0).to(tl.float32)
    weight_2 += tl.load(k_norm_ptr + zeros + HALF, mask=in_k, other=0.0).to(tl.float32)
    is_normed = in_q | in_k
    return (
        tl.where(is_normed, first * inverse_rms * weight_1, first),
        tl.where(is_normed, second * inverse_rms * weight_2, second),
    )


@triton.jit
def _rope_and_cache_kernel(
    qkv_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    eps: tl.tensor,
    k_inverse_scale: tl.tensor,
    v_inverse_scale: tl.tensor,
    N: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    FLOAT8: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < N + 2 * G) & (i < HALF)
    is_q = head < N
    is_v = head >= N + G

    row = qkv_ptr + token * (N + 2 * G) * 2 * HALF + head * 2 * HALF + i
    first = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row + HALF, mask=inside, other=0.0).to(tl.float32)

    in_q = inside & is_q
    in_k = inside & (head >= N) & (head < N + G)
    if NORM and not NORM_LAST:
        first, second = _normed(first, second, q_norm_ptr, k_norm_ptr, in_q, in_k, i, eps, HALF)

    position = tl.load(positions_ptr + token).to(tl.int64)
    table = cos_sin_ptr + position * 2 * HALF + i
    cos = tl.load(table, mask=i < HALF, other=0.0)
    sin = tl.load(table + HALF, mask=i < HALF, other=0.0)
    rotated_1 = tl.where(is_v, first, first * cos - second * sin)
    rotated_2 = tl.where(is_v, second, second * cos + first * sin)
    if NORM and NORM_LAST:
        rotated_1, rotated_2 = _normed(
            rotated_1, rotated_2, q_norm_ptr, k_norm_ptr, in_q, in_k, i, eps, HALF
        )

    q_out = q_ptr + token * N * 2 * HALF + head * 2 * HALF + i
    tl.store(q_out, rotated_1.to(q_ptr.dtype.element_ty), mask=in_q)
    tl.store(q_out + HALF, rotated_2.to(q_ptr.dtype.element_ty), mask=in_q)

    # A negative slot marks a padding token of a captured batch: nothing is written.
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        to_v = inside & is_v
        k_out = k_cache_ptr + (slot * G + head - N) * 2 * HALF + i
        v_out = v_cache_ptr + (slot * G + head - N - G) * 2 * HALF + i
        if FLOAT8:
            tl.store(k_out, to_e4m3(rotated_1 * k_inverse_scale), mask=in_k)
            tl.store(k_out + HALF, to_e4m3(rotated_2 * k_inverse_scale), mask=in_k)
            tl.store(v_out, to_e4m3(rotated_1 * v_inverse_scale), mask=to_v)
            tl.store(v_out + HALF, to_e4m3(rotated_2 * v_inverse_scale), mask=to_v)
        else:
            dtype = k_cache_ptr.dtype.element_ty
            tl.store(k_out, rotated_1.to(dtype), mask=in_k)
            tl.store(k_out + HALF, rotated_2.to(dtype), mask=in_k)
            tl.store(v_out, rotated_1.to(dtype), mask=to_v)
            tl.store(v_out + HALF, rotated_2.to(dtype), mask=to_v)


def rope_and_cache(
    qkv_TX: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    batch: Batch,
    layer: PagedKV,
    shape: AttentionShape,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """`Backend.rope_and_cache`. Slots below 0 are skipped."""
    T = qkv_TX.shape[0]
    N, G, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    q_TND = torch.empty((T, N, D), dtype=qkv_TX.dtype, device=qkv_TX.device)
    if T:
        heads = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(N + 2 * G))
        _rope_and_cache_kernel[(T, triton.cdiv(N + 2 * G, heads))](
            qkv_TX,
            cos_sin_PD,
            batch.positions_T,
            batch.slot_mapping_T,
            cos_sin_PD if q_norm_D is None else q_norm_D,
            cos_sin_PD if k_norm_D is None else k_norm_D,
            q_TND,
            layer.keys,
            layer.values,
            eps,
            1.0 / layer.k_scale,
            1.0 / layer.v_scale,
            N=N,
            G=G,
            HALF=D // 2,
            BLOCK_HALF=triton.next_power_of_2(D // 2),
            HEADS=heads,
            NORM=q_norm_D is not None,
            NORM_LAST=q_norm_D is not None and shape.norms_last,
            FLOAT8=layer.is_float8,
            num_warps=4,
        )
    return q_TND
