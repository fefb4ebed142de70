"""A recurrence over a long slice in chunks of tokens, by matrix products.

In a chunk that begins with a matrix M, its tokens' u are U = (I + L)^-1 rates (V - decays K M),
where L, below the diagonal, has rates, the decays between two tokens, and products of their keys:
the WY form of DeltaNet (arXiv 2406.06484), with the decays of Gated DeltaNet (arXiv 2412.06464).
One launch computes what does not depend on M, for all chunks at once. Another goes from chunk to
chunk. Products of operands in TF32, which holds 16-bit keys and queries, are summed in float32.

Shape suffixes as in `kernels.recurrence`, besides L tokens of a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.recurrence import Recurrence, StateLayer, StateRows
from kernels.triton.prepared_chunks import (
    CHUNK,
    LEAST_TOKENS,
    UNALIGNED,
    gates,
    prepare,
    vectors,
)
from kernels.triton.saved_states import save_of, saves_of

_HALF_KEY = 64
_BLOCK_D, _NUM_WARPS = tl.constexpr(16), 4  # with more of either, registers spill


@triton.jit(do_not_specialize=["num_saves"], do_not_specialize_on_alignment=UNALIGNED)
def _chunk_kernel(
    qkv_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    solved_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    state_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    saves_ptr: tl.tensor,
    save_lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_saves: tl.tensor,
    qkv_stride: tl.tensor,
    decays_stride: tl.tensor,
    rates_stride: tl.tensor,
    row_stride: tl.tensor,
    G: tl.constexpr,
    N: tl.constexpr,
    F: tl.constexpr,
    D: tl.constexpr,
    DELTA: tl.constexpr,
    BLOCK_F: tl.constexpr,
) -> None:
    """_BLOCK_D columns of one head's matrix, over the chunks of a slice. A matrix of more than
    BLOCK_F rows is in two halves, so that no operand of a product spills."""
    HALVES: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    n = tl.program_id(1)
    s = tl.program_id(2)
    begin = tl.load(query_starts_ptr + s)
    end = tl.load(query_starts_ptr + s + 1)
    if end - begin < LEAST_TOKENS:
        return
    row = tl.arange(0, CHUNK)
    f = tl.arange(0, BLOCK_F)
    d = tl.program_id(0) * _BLOCK_D + tl.arange(0, _BLOCK_D)
    second = BLOCK_F + f
    place_FD = (n * F + f[:, None]) * D + d[None, :]
    is_number = (f < F)[:, None] & (d < D)[None, :]
    is_second = (second < F)[:, None] & (d < D)[None, :]
    place_LL = row[:, None] * (N * CHUNK) + row[None, :]
    read = tl.load(reads_ptr + s).to(tl.int64)
    write = tl.load(writes_ptr + s).to(tl.int64)
    save, saved = save_of(saves_ptr, save_lengths_ptr, s, begin, end, num_saves)
    state_FD = tl.zeros((BLOCK_F, _BLOCK_D), tl.float32)
    second_FD = tl.zeros((BLOCK_F, _BLOCK_D), tl.float32)
    if read >= 0:
        old_ptr = state_ptr + read * row_stride + place_FD
        state_FD = tl.load(old_ptr, mask=is_number, other=0.0)
        if HALVES == 2:
            second_FD = tl.load(old_ptr + BLOCK_F * D, mask=is_second, other=0.0)
    first = begin.to(tl.int64)
    decays_ptr += first * decays_stride + n
    rates_ptr += first * rates_stride + n
    qkv_ptr += first * qkv_stride
    q_ptr = qkv_ptr + n // (N // G) * F
    k_ptr = q_ptr + G * F
    v_ptr = qkv_ptr + 2 * G * F + n * D
    head = first * N + n
    solved_ptr += head * CHUNK
    weights_ptr += head * CHUNK
    scales_ptr += head * 2
    out_ptr += head * D
    for _ in range(tl.cdiv(saved - begin, CHUNK) + tl.cdiv(end - saved, CHUNK)):
        # As many tokens as there are before the state is saved, or before the slice's end.
        step = tl.minimum(tl.where(begin < saved, saved, end) - begin, CHUNK)
        begin += step
        is_token = row < step
        log_L, rate_L = gates(decays_ptr, rates_ptr, is_token, decays_stride, rates_stride)
        total = tl.sum(log_L, 0)
        log_L = tl.cumsum(log_L, 0)
        query_L = tl.exp(log_L)
        key_L = tl.exp(total - log_L)
        u_LD = vectors(v_ptr, is_token, d, qkv_stride, D)
        if DELTA:
            k_scale_L = tl.load(scales_ptr + row * (N * 2) + 1, mask=is_token, other=0.0)
            k_LF = vectors(k_ptr, is_token, f, qkv_stride, F)
            kept_LD = tl.dot(k_LF, state_FD, input_precision="tf32")
            if HALVES == 2:
                k_LF = vectors(k_ptr, is_token, second, qkv_stride, F)
                kept_LD = tl.dot(k_LF, second_FD, kept_LD, input_precision="tf32")
            u_LD -= kept_LD * (query_L * k_scale_L)[:, None]
            solved_LL = tl.load(solved_ptr + place_LL, mask=is_token[:, None], other=0.0)
            u_LD = tl.dot(solved_LL, u_LD, input_precision="tf32")
            query_L *= tl.load(scales_ptr + row * (N * 2), mask=is_token, other=0.0)
            key_L *= k_scale_L
        else:
            u_LD *= rate_L[:, None]
        q_LF = vectors(q_ptr, is_token, f, qkv_stride, F)
        out_LD = tl.dot(q_LF, state_FD, input_precision="tf32")
        if HALVES == 2:
            q_LF = vectors(q_ptr, is_token, second, qkv_stride, F)
            out_LD = tl.dot(q_LF, second_FD, out_LD, input_precision="tf32")
        out_LD *= query_L[:, None]
        weights_LL = tl.load(weights_ptr + place_LL, mask=is_token[:, None], other=0.0)
        out_LD = tl.dot(weights_LL, u_LD, out_LD, input_precision="tf32")
        tl.store(
            out_ptr + row[:, None] * (N * D) + d[None, :],
            out_LD.to(out_ptr.dtype.element_ty),
            mask=is_token[:, None] & (d < D)[None, :],
        )
        state_FD *= tl.exp(total)
        u_LD *= key_L[:, None]
        k_FL = tl.trans(vectors(k_ptr, is_token, f, qkv_stride, F))
        state_FD = tl.dot(k_FL, u_LD, state_FD, input_precision="tf32")
        if HALVES == 2:
            second_FD *= tl.exp(total)
            k_FL = tl.trans(vectors(k_ptr, is_token, second, qkv_stride, F))
            second_FD = tl.dot(k_FL, u_LD, second_FD, input_precision="tf32")
        decays_ptr += step * decays_stride
        rates_ptr += step * rates_stride
        q_ptr += step * qkv_stride
        k_ptr += step * qkv_stride
        v_ptr += step * qkv_stride
        solved_ptr += step * (N * CHUNK)
        weights_ptr += step * (N * CHUNK)
        scales_ptr += step * (N * 2)
        out_ptr += step * (N * D)
        if (begin == saved) & (save >= 0):
            save_ptr = state_ptr + save * row_stride + place_FD
            tl.store(save_ptr, state_FD, mask=is_number)
            if HALVES == 2:
                tl.store(save_ptr + BLOCK_F * D, second_FD, mask=is_second)
    new_ptr = state_ptr + write * row_stride + place_FD
    tl.store(new_ptr, state_FD, mask=is_number)
    if HALVES == 2:
        tl.store(new_ptr + BLOCK_F * D, second_FD, mask=is_second)


def computes(num_tokens: int, dtype: torch.dtype, form: Recurrence) -> bool:
    """Whether a batch may have such slices, and there is this way for them: not for float32, which
    TF32 does not hold, nor for keys of which two halves would spill."""
    return (
        num_tokens >= LEAST_TOKENS.value and dtype.itemsize == 2 and form.key_dim <= 2 * _HALF_KEY
    )


def long_slices(
    qkv_TC: torch.Tensor,
    decays_TN: torch.Tensor,
    rates_TN: torch.Tensor,
    layer: StateLayer,
    rows: StateRows,
    form: Recurrence,
    out_TX: torch.Tensor,
) -> None:
    """`Recurrent.recurrence` for slices of at least LEAST_TOKENS; others stay as they are."""
    assert layer.matrix_RNFD is not None
    D, block_f = form.value_dim, min(_HALF_KEY, max(16, triton.next_power_of_2(form.key_dim)))
    prepared = prepare(qkv_TC, decays_TN, rates_TN, rows, form, block_f)
    *saves, num_saves = saves_of(rows)
    _chunk_kernel[(triton.cdiv(D, _BLOCK_D.value), form.num_heads, rows.reads_S.shape[0])](
        qkv_TC,
        decays_TN,
        rates_TN,
        *prepared,
        layer.matrix_RNFD,
        rows.query_starts_S1,
        rows.reads_S,
        rows.writes_S,
        *saves,
        out_TX,
        num_saves,
        qkv_TC.stride(0),
        decays_TN.stride(0),
        rates_TN.stride(0),
        layer.matrix_RNFD.stride(0),
        G=form.num_key_heads,
        N=form.num_heads,
        F=form.key_dim,
        D=D,
        DELTA=form.delta,
        BLOCK_F=block_f,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )
