"""What the chunks of long slices do not take from each other: see `kernels.triton.chunkwise`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.recurrence import Recurrence, StateRows
from kernels.triton.saved_states import save_of, saves_of

CHUNK = tl.constexpr(64)
LEAST_TOKENS = tl.constexpr(64)  # of a slice that is computed in chunks
_NUM_WARPS = 8  # with four, registers spill
_BLOCK_S = tl.constexpr(128)
_EPS = tl.constexpr(1e-6)  # of the lengths of queries and keys
# Leaves nothing of a state; logarithms of less would take digits from those that they are added to.
_LEAST_DECAY = tl.constexpr(1e-20)
# Read number by number, so that their alignment, which batches may change, makes no variants.
UNALIGNED = [
    f"{name}_ptr"
    for name in ("query_starts", "reads", "writes", "saves", "save_lengths", "decays", "rates")
]


@triton.jit
def gates(
    decays_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    is_token_L: tl.tensor,
    decays_stride: tl.tensor,
    rates_stride: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Logarithms of decays, and rates; what is no token changes nothing."""
    row = tl.arange(0, CHUNK)
    decay_L = tl.load(decays_ptr + row * decays_stride, mask=is_token_L, other=1.0)
    rate_L = tl.load(rates_ptr + row * rates_stride, mask=is_token_L, other=0.0)
    return tl.log(tl.maximum(decay_L, _LEAST_DECAY)), rate_L


@triton.jit
def vectors(
    ptr: tl.tensor, is_token_L: tl.tensor, x: tl.tensor, stride: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """The numbers x of rows, in float32; zeros from WIDTH on, and for what is no token."""
    place = tl.arange(0, CHUNK)[:, None] * stride + x[None, :]
    mask = is_token_L[:, None] & (x < WIDTH)[None, :]
    return tl.load(ptr + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_slices", "num_saves"], do_not_specialize_on_alignment=UNALIGNED)
def _prepare_kernel(
    qkv_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    saves_ptr: tl.tensor,
    save_lengths_ptr: tl.tensor,
    solved_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_slices: tl.tensor,
    num_saves: tl.tensor,
    qkv_stride: tl.tensor,
    decays_stride: tl.tensor,
    rates_stride: tl.tensor,
    G: tl.constexpr,
    N: tl.constexpr,
    F: tl.constexpr,
    DELTA: tl.constexpr,
    BLOCK_F: tl.constexpr,
) -> None:
    """What one chunk of one head takes from no other: the inverse of I + L times rates, queries
    times keys, and the scales of both."""
    # Slice s has the programs from starts[s] // CHUNK + 2 s on: at least as many as it has chunks,
    # of which two may be short: its last, and the last before it saves a state.
    program = tl.program_id(0)
    n = tl.program_id(1)
    s = -1
    for base in range(0, num_slices, _BLOCK_S):
        other = base + tl.arange(0, _BLOCK_S)
        start_S = tl.load(query_starts_ptr + other, mask=other < num_slices, other=0)
        is_before = (other < num_slices) & (start_S // CHUNK + 2 * other <= program)
        s += tl.sum(is_before.to(tl.int32), 0)
    begin = tl.load(query_starts_ptr + s)
    end = tl.load(query_starts_ptr + s + 1)
    _, saved = save_of(saves_ptr, save_lengths_ptr, s, begin, end, num_saves)
    chunk = program - begin // CHUNK - 2 * s
    first = begin + chunk * CHUNK
    stop = saved
    if first >= saved:
        first = saved + (chunk - tl.cdiv(saved - begin, CHUNK)) * CHUNK
        stop = end
    if (first >= end) | (end - begin < LEAST_TOKENS):
        return
    row = tl.arange(0, CHUNK)
    is_token = first + row < stop
    first = first.to(tl.int64)
    decays_ptr += first * decays_stride + n
    rates_ptr += first * rates_stride + n
    log_L, rate_L = gates(decays_ptr, rates_ptr, is_token, decays_stride, rates_stride)
    log_L = tl.cumsum(log_L, 0)
    q_ptr = qkv_ptr + first * qkv_stride + n // (N // G) * F
    weights_LL = tl.zeros((CHUNK, CHUNK), tl.float32)
    lower_LL = tl.zeros((CHUNK, CHUNK), tl.float32)
    q_squares_L = tl.zeros((CHUNK,), tl.float32)
    k_squares_L = tl.zeros((CHUNK,), tl.float32)
    for base in range(0, F, BLOCK_F):
        f = base + tl.arange(0, BLOCK_F)
        q_LF = vectors(q_ptr, is_token, f, qkv_stride, F)
        k_LF = vectors(q_ptr + G * F, is_token, f, qkv_stride, F)
        weights_LL = tl.dot(q_LF, tl.trans(k_LF), weights_LL, input_precision="tf32")
        if DELTA:
            lower_LL = tl.dot(k_LF, tl.trans(k_LF), lower_LL, input_precision="tf32")
            q_squares_L += tl.sum(q_LF * q_LF, 1)
            k_squares_L += tl.sum(k_LF * k_LF, 1)
    head = first * N + n
    place_LL = row[:, None] * (N * CHUNK) + row[None, :]
    is_past_LL = row[:, None] >= row[None, :]
    decay_LL = tl.exp(tl.where(is_past_LL, log_L[:, None] - log_L[None, :], float("-inf")))
    weights_LL *= decay_LL
    if DELTA:
        q_scale_L = tl.rsqrt(q_squares_L + _EPS) * F**-0.5
        k_scale_L = tl.rsqrt(k_squares_L + _EPS)
        scales_ptr += head * 2 + row * (N * 2)
        tl.store(scales_ptr, q_scale_L, mask=is_token)
        tl.store(scales_ptr + 1, k_scale_L, mask=is_token)
        weights_LL *= q_scale_L[:, None] * k_scale_L[None, :]
        lower_LL *= decay_LL * (rate_L * k_scale_L)[:, None] * k_scale_L[None, :]
        lower_LL = tl.where(row[:, None] > row[None, :], lower_LL, 0.0)
        # Row by row: those before it, which are final, in the measure of L's row.
        solved_LL = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
        for r in range(1, CHUNK):
            is_row = (row == r)[:, None]
            lower_L = tl.sum(tl.where(is_row, lower_LL, 0.0), 0)
            taken_L = tl.sum(tl.expand_dims(lower_L, 1) * solved_LL, 0)
            solved_LL = tl.where(is_row, solved_LL - taken_L[None, :], solved_LL)
        solved_LL *= rate_L[None, :]
        tl.store(solved_ptr + head * CHUNK + place_LL, solved_LL, mask=is_token[:, None])
    tl.store(weights_ptr + head * CHUNK + place_LL, weights_LL, mask=is_token[:, None])


def prepare(
    qkv_TC: torch.Tensor,
    decays_TN: torch.Tensor,
    rates_TN: torch.Tensor,
    rows: StateRows,
    form: Recurrence,
    block_f: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the tokens of slices of at least LEAST_TOKENS, (T, N, CHUNK) of their chunk's tokens each:
    rows of (I + L)^-1 rates; decayed products of its query, scaled, and their keys. (T, N, 2):
    the scales of its query and key, with the delta rule."""
    T, S, N = len(qkv_TC), rows.reads_S.shape[0], form.num_heads
    solved_TNL, weights_TNL = (decays_TN.new_empty((T, N, CHUNK.value)) for _ in range(2))
    scales_TN2 = decays_TN.new_empty((T, N, 2))
    *saves, num_saves = saves_of(rows)
    _prepare_kernel[(T // CHUNK.value + 2 * S, N)](
        qkv_TC,
        decays_TN,
        rates_TN,
        rows.query_starts_S1,
        *saves,
        solved_TNL,
        weights_TNL,
        scales_TN2,
        S,
        num_saves,
        qkv_TC.stride(0),
        decays_TN.stride(0),
        rates_TN.stride(0),
        G=form.num_key_heads,
        N=N,
        F=form.key_dim,
        DELTA=form.delta,
        BLOCK_F=block_f,
        num_warps=_NUM_WARPS,
    )
    return solved_TNL, weights_TNL, scales_TN2
