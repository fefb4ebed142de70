"""Convolutions and recurrences with a state of fixed size.

Which slice a program has, and how long it is, are read on the device: grids depend on the shapes of
a batch alone, and a launch can be captured. Slices of no tokens are padding, whose states stay as
they are. The tokens of a slice are computed one by one; of long ones, in chunks (`chunkwise.py`).

Shape suffixes as in `kernels.recurrence`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.recurrence import Recurrence, StateLayer, StateRows
from kernels.triton import chunkwise
from kernels.triton.prepared_chunks import LEAST_TOKENS
from kernels.triton.saved_states import save_of, saves_of
from kernels.triton.tiles import recurrence_block

_EPS = tl.constexpr(1e-6)  # of the lengths of queries and keys
# Of convolutions. A thread loads 16 bytes of a tap at once; with 32, sm_80 spills in float32.
_BLOCK_T, _BLOCK_C_BYTES, _BLOCK_S = 8, 256, 128


# Read number by number, so that their alignment, which batches may change, makes no variants.
_ROWS = ["query_starts_ptr", "reads_ptr", "writes_ptr", "saves_ptr", "save_lengths_ptr"]


@triton.jit
def _leave_inputs(
    row_T1: tl.tensor,
    own_TC: tl.tensor,
    old_T1: tl.tensor,
    is_old: tl.tensor,
    t: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    leaves: tl.tensor,
    c: tl.tensor,
    C: tl.constexpr,
    TAPS: tl.constexpr,
) -> None:
    """The last inputs are the new state: each token leaves its own there, and a slice's first one
    those before it that a short slice keeps."""
    row = TAPS - 1 + t - end
    is_last = leaves & (row >= 0) & (row < TAPS - 1)
    own_TC = own_TC.to(row_T1.dtype.element_ty)
    tl.store(row_T1 + row[:, None] * C + c, own_TC, mask=is_last[:, None] & (c < C))
    for tap in tl.static_range(TAPS - 1):
        row = tap + begin - end
        is_kept = leaves & (t == begin) & (row >= 0)
        mask_TC = (is_kept & is_old)[:, None] & (c < C)
        old_TC = tl.load(old_T1 + tap * C + c, mask=mask_TC, other=0.0)
        tl.store(row_T1 + row[:, None] * C + c, old_TC, mask=is_kept[:, None] & (c < C))


@triton.jit(do_not_specialize=["num_slices", "num_saves"], do_not_specialize_on_alignment=_ROWS)
def _causal_conv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    saves_ptr: tl.tensor,
    save_lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_slices: tl.tensor,
    num_saves: tl.tensor,
    x_stride: tl.tensor,
    row_stride: tl.tensor,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    BIASED: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """BLOCK_T tokens, of any slices, by BLOCK_C channels."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    s = tl.zeros((BLOCK_T,), tl.int32)  # slices that end before t
    for base in range(0, num_slices, BLOCK_S):
        other = base + tl.arange(0, BLOCK_S)
        is_slice = other < num_slices
        end_S = tl.load(query_starts_ptr + 1 + other, mask=is_slice, other=0)
        s += tl.sum((is_slice[None, :] & (end_S[None, :] <= t[:, None])).to(tl.int32), 1)
    is_token = s < num_slices  # the others pad a captured batch
    begin = tl.load(query_starts_ptr + s, mask=is_token, other=0)
    end = tl.load(query_starts_ptr + s + 1, mask=is_token, other=0)
    read = tl.load(reads_ptr + s, mask=is_token, other=-1)
    write = tl.load(writes_ptr + s, mask=is_token, other=0)
    old_T1 = state_ptr + read.to(tl.int64)[:, None] * row_stride
    x_T1 = x_ptr + t.to(tl.int64)[:, None] * x_stride
    sum_TC = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tap in tl.static_range(TAPS):
        is_own = is_token & (t - (TAPS - 1 - tap) >= begin)  # not of a token before the slice
        own_TC = tl.load(
            x_T1 - (TAPS - 1 - tap) * x_stride + c, mask=is_own[:, None] & (c < C), other=0.0
        )
        is_old = is_token & ~is_own & (read >= 0)  # else zeros
        old_TC = tl.load(
            old_T1 + (tap + t - begin)[:, None] * C + c,
            mask=is_old[:, None] & (c < C),
            other=0.0,
        )
        input_TC = tl.where(is_own[:, None], own_TC, old_TC)
        weight_C = tl.load(weight_ptr + tap * C + c, mask=c < C, other=0.0)
        sum_TC += input_TC.to(tl.float32) * weight_C
    if BIASED:
        sum_TC += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    if SILU:
        sum_TC *= tl.sigmoid(sum_TC)
    out_TC = out_ptr + t.to(tl.int64)[:, None] * C + c
    tl.store(out_TC, sum_TC.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & (c < C))
    new_T1 = state_ptr + write.to(tl.int64)[:, None] * row_stride
    _leave_inputs(new_T1, own_TC, old_T1, read >= 0, t, begin, end, is_token, c, C, TAPS)
    save = tl.load(saves_ptr + s, mask=s < num_saves, other=-1)
    saved = begin + tl.load(save_lengths_ptr + s, mask=s < num_saves, other=0)
    save_T1 = state_ptr + save.to(tl.int64)[:, None] * row_stride
    _leave_inputs(save_T1, own_TC, old_T1, read >= 0, t, begin, saved, save >= 0, c, C, TAPS)


@triton.jit
def _token(
    qkv_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    rate_ptr: tl.tensor,
    n: tl.tensor,
    f: tl.tensor,
    d: tl.tensor,
    G: tl.constexpr,
    N: tl.constexpr,
    F: tl.constexpr,
    D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Query, key, value, decay and rate of a head."""
    q_ptr = qkv_ptr + n // (N // G) * F
    q_F = tl.load(q_ptr + f, mask=f < F, other=0.0)
    k_F = tl.load(q_ptr + G * F + f, mask=f < F, other=0.0)
    v_D = tl.load(qkv_ptr + 2 * G * F + n * D + d, mask=d < D, other=0.0)
    return q_F, k_F, v_D, tl.load(decay_ptr + n), tl.load(rate_ptr + n)


@triton.jit(
    do_not_specialize=["longest", "num_saves"],
    do_not_specialize_on_alignment=[*_ROWS, "decays_ptr", "rates_ptr"],
)
def _recurrence_kernel(
    qkv_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    state_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    saves_ptr: tl.tensor,
    save_lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    longest: tl.tensor,
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
    BLOCK_D: tl.constexpr,
) -> None:
    """BLOCK_D columns of one head's matrix, over the tokens of a slice; longer slices than
    `longest` are left out. G heads of keys."""
    n = tl.program_id(1)
    s = tl.program_id(2)
    begin = tl.load(query_starts_ptr + s)
    end = tl.load(query_starts_ptr + s + 1)
    if (begin >= end) | (end - begin > longest):
        return
    f = tl.arange(0, BLOCK_F)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_number = (f < F)[:, None] & (d < D)[None, :]
    place = (n * F + f[:, None]) * D + d[None, :]
    save, saved = save_of(saves_ptr, save_lengths_ptr, s, begin, end, num_saves)
    read = tl.load(reads_ptr + s).to(tl.int64)
    write = tl.load(writes_ptr + s).to(tl.int64)
    state_FD = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
    if read >= 0:
        state_FD = tl.load(state_ptr + read * row_stride + place, mask=is_number, other=0.0)
    first = begin.to(tl.int64)
    qkv_ptr += first * qkv_stride
    decays_ptr += first * decays_stride
    rates_ptr += first * rates_stride
    out_ptr += (first * N + n) * D
    q_F, k_F, v_D, decay, rate = _token(qkv_ptr, decays_ptr, rates_ptr, n, f, d, G, N, F, D)
    for t in range(begin, end):
        # The next token is loaded while this one is computed; after the last one, it again.
        step = (t + 1 < end).to(tl.int32)
        qkv_ptr += step * qkv_stride
        decays_ptr += step * decays_stride
        rates_ptr += step * rates_stride
        next_q_F, next_k_F, next_v_D, next_decay, next_rate = _token(
            qkv_ptr, decays_ptr, rates_ptr, n, f, d, G, N, F, D
        )
        query_F, key_F, u_D = q_F.to(tl.float32), k_F.to(tl.float32), v_D.to(tl.float32)
        state_FD *= decay
        if DELTA:
            query_F *= tl.rsqrt(tl.sum(query_F * query_F, 0) + _EPS) * F**-0.5
            key_F *= tl.rsqrt(tl.sum(key_F * key_F, 0) + _EPS)
            u_D -= tl.sum(state_FD * key_F[:, None], 0)
        state_FD += key_F[:, None] * (u_D * rate)[None, :]
        out_D = tl.sum(state_FD * query_F[:, None], 0)
        tl.store(out_ptr + d, out_D.to(out_ptr.dtype.element_ty), mask=d < D)
        out_ptr += N * D
        q_F, k_F, v_D, decay, rate = next_q_F, next_k_F, next_v_D, next_decay, next_rate
        if (t + 1 == saved) & (save >= 0):
            tl.store(state_ptr + save * row_stride + place, state_FD, mask=is_number)
    tl.store(state_ptr + write * row_stride + place, state_FD, mask=is_number)


def causal_conv(
    x_TC: torch.Tensor,
    weight_JC: torch.Tensor,
    bias_C: torch.Tensor | None,
    layer: StateLayer,
    rows: StateRows,
    silu: bool,
) -> torch.Tensor:
    """See `Recurrent.causal_conv`. Rows of padding tokens (captured batches) are undefined."""
    T, C = x_TC.shape
    *saves, num_saves = saves_of(rows)
    out_TC = torch.empty((T, C), dtype=x_TC.dtype, device=x_TC.device)
    if T:
        block_c = _BLOCK_C_BYTES // x_TC.element_size()
        _causal_conv_kernel[(triton.cdiv(T, _BLOCK_T), triton.cdiv(C, block_c))](
            x_TC,
            weight_JC,
            weight_JC if bias_C is None else bias_C,
            layer.conv_RJC,
            rows.query_starts_S1,
            rows.reads_S,
            rows.writes_S,
            *saves,
            out_TC,
            rows.reads_S.shape[0],
            num_saves,
            x_TC.stride(0),
            layer.conv_RJC.stride(0),
            C=C,
            TAPS=weight_JC.shape[0],
            BIASED=bias_C is not None,
            SILU=silu,
            BLOCK_T=_BLOCK_T,
            BLOCK_C=block_c,
            BLOCK_S=_BLOCK_S,
            num_warps=4,
        )
    return out_TC


def recurrence(
    qkv_TC: torch.Tensor,
    decays_TN: torch.Tensor,
    rates_TN: torch.Tensor,
    layer: StateLayer,
    rows: StateRows,
    form: Recurrence,
) -> torch.Tensor:
    """See `Recurrent.recurrence`. Rows of padding tokens (captured batches) are undefined."""
    if layer.matrix_RNFD is None:
        raise ValueError("a recurrence needs a layer with matrices")
    T, S, N, D = len(qkv_TC), rows.reads_S.shape[0], form.num_heads, form.value_dim
    *saves, num_saves = saves_of(rows)
    out_TX = torch.empty((T, N * D), dtype=qkv_TC.dtype, device=qkv_TC.device)
    # No launch for chunks in the graphs of decodes, which have the shape T == S.
    least = LEAST_TOKENS.value
    in_chunks = T > S > 0 and chunkwise.computes(T, qkv_TC.dtype, form)
    if in_chunks:
        chunkwise.long_slices(qkv_TC, decays_TN, rates_TN, layer, rows, form, out_TX)
    if T:
        block_f, block_d = recurrence_block(form.key_dim, D)
        _recurrence_kernel[(triton.cdiv(D, block_d), N, S)](
            qkv_TC,
            decays_TN,
            rates_TN,
            layer.matrix_RNFD,
            rows.query_starts_S1,
            rows.reads_S,
            rows.writes_S,
            *saves,
            out_TX,
            least - 1 if in_chunks else T,
            num_saves,
            qkv_TC.stride(0),
            decays_TN.stride(0),
            rates_TN.stride(0),
            layer.matrix_RNFD.stride(0),
            G=form.num_key_heads,
            N=N,
            F=form.key_dim,
            D=D,
            DELTA=form.delta,
            BLOCK_F=block_f,
            BLOCK_D=block_d,
            num_warps=1,
        )
    return out_TX
