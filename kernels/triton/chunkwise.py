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

LEAST_TOKENS = 64  # of a slice that is computed in chunks
_NUM_WARPS = 8  # with four, or more columns, registers spill
_LEAST_TOKENS = tl.constexpr(LEAST_TOKENS)
_CHUNK, _HALF_KEY = tl.constexpr(64), 64
_BLOCK_D, _BLOCK_S = tl.constexpr(16), tl.constexpr(128)
_EPS = tl.constexpr(1e-6)  # of the lengths of queries and keys
# Leaves nothing of a state; logarithms of less would take digits from those that they are added to.
_LEAST_DECAY = tl.constexpr(1e-20)
# Read number by number, so that their alignment, which batches may change, makes no variants.
_UNALIGNED = ["query_starts_ptr", "reads_ptr", "writes_ptr", "decays_ptr", "rates_ptr"]


@triton.jit
def _gates(
    decays_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    is_token_L: tl.tensor,
    decays_stride: tl.tensor,
    rates_stride: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Logarithms of decays, and rates; what is no token changes nothing."""
    row = tl.arange(0, _CHUNK)
    decay_L = tl.load(decays_ptr + row * decays_stride, mask=is_token_L, other=1.0)
    rate_L = tl.load(rates_ptr + row * rates_stride, mask=is_token_L, other=0.0)
    return tl.log(tl.maximum(decay_L, _LEAST_DECAY)), rate_L


@triton.jit
def _vectors(
    ptr: tl.tensor, is_token_L: tl.tensor, x: tl.tensor, stride: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """The numbers x of rows, in float32; zeros from WIDTH on, and for what is no token."""
    place = tl.arange(0, _CHUNK)[:, None] * stride + x[None, :]
    mask = is_token_L[:, None] & (x < WIDTH)[None, :]
    return tl.load(ptr + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_slices"], do_not_specialize_on_alignment=_UNALIGNED)
def _prepare_kernel(
    qkv_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    solved_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_slices: tl.tensor,
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
    # Slice s has the programs from starts[s] // _CHUNK + s on: at least as many as it has chunks.
    program = tl.program_id(0)
    n = tl.program_id(1)
    s = -1
    for base in range(0, num_slices, _BLOCK_S):
        other = base + tl.arange(0, _BLOCK_S)
        start_S = tl.load(query_starts_ptr + other, mask=other < num_slices, other=0)
        is_before = (other < num_slices) & (start_S // _CHUNK + other <= program)
        s += tl.sum(is_before.to(tl.int32), 0)
    begin = tl.load(query_starts_ptr + s)
    end = tl.load(query_starts_ptr + s + 1)
    first = begin + (program - begin // _CHUNK - s) * _CHUNK
    if (first >= end) | (end - begin < _LEAST_TOKENS):
        return
    row = tl.arange(0, _CHUNK)
    is_token = first + row < end
    first = first.to(tl.int64)
    decays_ptr += first * decays_stride + n
    rates_ptr += first * rates_stride + n
    log_L, rate_L = _gates(decays_ptr, rates_ptr, is_token, decays_stride, rates_stride)
    log_L = tl.cumsum(log_L, 0)
    q_ptr = qkv_ptr + first * qkv_stride + n // (N // G) * F
    weights_LL = tl.zeros((_CHUNK, _CHUNK), tl.float32)
    lower_LL = tl.zeros((_CHUNK, _CHUNK), tl.float32)
    q_squares_L = tl.zeros((_CHUNK,), tl.float32)
    k_squares_L = tl.zeros((_CHUNK,), tl.float32)
    for base in range(0, F, BLOCK_F):
        f = base + tl.arange(0, BLOCK_F)
        q_LF = _vectors(q_ptr, is_token, f, qkv_stride, F)
        k_LF = _vectors(q_ptr + G * F, is_token, f, qkv_stride, F)
        weights_LL = tl.dot(q_LF, tl.trans(k_LF), weights_LL, input_precision="tf32")
        if DELTA:
            lower_LL = tl.dot(k_LF, tl.trans(k_LF), lower_LL, input_precision="tf32")
            q_squares_L += tl.sum(q_LF * q_LF, 1)
            k_squares_L += tl.sum(k_LF * k_LF, 1)
    head = first * N + n
    place_LL = row[:, None] * (N * _CHUNK) + row[None, :]
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
        for r in range(1, _CHUNK):
            is_row = (row == r)[:, None]
            lower_L = tl.sum(tl.where(is_row, lower_LL, 0.0), 0)
            taken_L = tl.sum(tl.expand_dims(lower_L, 1) * solved_LL, 0)
            solved_LL = tl.where(is_row, solved_LL - taken_L[None, :], solved_LL)
        solved_LL *= rate_L[None, :]
        tl.store(solved_ptr + head * _CHUNK + place_LL, solved_LL, mask=is_token[:, None])
    tl.store(weights_ptr + head * _CHUNK + place_LL, weights_LL, mask=is_token[:, None])


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
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
    out_ptr: tl.tensor,
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
    if end - begin < _LEAST_TOKENS:
        return
    row = tl.arange(0, _CHUNK)
    f = tl.arange(0, BLOCK_F)
    d = tl.program_id(0) * _BLOCK_D + tl.arange(0, _BLOCK_D)
    second = BLOCK_F + f
    place_FD = (n * F + f[:, None]) * D + d[None, :]
    is_number = (f < F)[:, None] & (d < D)[None, :]
    is_second = (second < F)[:, None] & (d < D)[None, :]
    place_LL = row[:, None] * (N * _CHUNK) + row[None, :]
    read = tl.load(reads_ptr + s).to(tl.int64)
    write = tl.load(writes_ptr + s).to(tl.int64)
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
    solved_ptr += head * _CHUNK
    weights_ptr += head * _CHUNK
    scales_ptr += head * 2
    out_ptr += head * D
    for left in range(end - begin, 0, -_CHUNK):
        is_token = row < left
        log_L, rate_L = _gates(decays_ptr, rates_ptr, is_token, decays_stride, rates_stride)
        total = tl.sum(log_L, 0)
        log_L = tl.cumsum(log_L, 0)
        query_L = tl.exp(log_L)
        key_L = tl.exp(total - log_L)
        u_LD = _vectors(v_ptr, is_token, d, qkv_stride, D)
        if DELTA:
            k_scale_L = tl.load(scales_ptr + row * (N * 2) + 1, mask=is_token, other=0.0)
            k_LF = _vectors(k_ptr, is_token, f, qkv_stride, F)
            kept_LD = tl.dot(k_LF, state_FD, input_precision="tf32")
            if HALVES == 2:
                k_LF = _vectors(k_ptr, is_token, second, qkv_stride, F)
                kept_LD = tl.dot(k_LF, second_FD, kept_LD, input_precision="tf32")
            u_LD -= kept_LD * (query_L * k_scale_L)[:, None]
            solved_LL = tl.load(solved_ptr + place_LL, mask=is_token[:, None], other=0.0)
            u_LD = tl.dot(solved_LL, u_LD, input_precision="tf32")
            query_L *= tl.load(scales_ptr + row * (N * 2), mask=is_token, other=0.0)
            key_L *= k_scale_L
        else:
            u_LD *= rate_L[:, None]
        q_LF = _vectors(q_ptr, is_token, f, qkv_stride, F)
        out_LD = tl.dot(q_LF, state_FD, input_precision="tf32")
        if HALVES == 2:
            q_LF = _vectors(q_ptr, is_token, second, qkv_stride, F)
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
        k_FL = tl.trans(_vectors(k_ptr, is_token, f, qkv_stride, F))
        state_FD = tl.dot(k_FL, u_LD, state_FD, input_precision="tf32")
        if HALVES == 2:
            second_FD *= tl.exp(total)
            k_FL = tl.trans(_vectors(k_ptr, is_token, second, qkv_stride, F))
            second_FD = tl.dot(k_FL, u_LD, second_FD, input_precision="tf32")
        decays_ptr += _CHUNK * decays_stride
        rates_ptr += _CHUNK * rates_stride
        q_ptr += _CHUNK * qkv_stride
        k_ptr += _CHUNK * qkv_stride
        v_ptr += _CHUNK * qkv_stride
        solved_ptr += _CHUNK * N * _CHUNK
        weights_ptr += _CHUNK * N * _CHUNK
        scales_ptr += _CHUNK * N * 2
        out_ptr += _CHUNK * N * D
    new_ptr = state_ptr + write * row_stride + place_FD
    tl.store(new_ptr, state_FD, mask=is_number)
    if HALVES == 2:
        tl.store(new_ptr + BLOCK_F * D, second_FD, mask=is_second)


def computes(num_tokens: int, dtype: torch.dtype, form: Recurrence) -> bool:
    """Whether a batch may have such slices, and there is this way for them: not for float32, which
    TF32 does not hold, nor for keys of which two halves would spill."""
    return num_tokens >= LEAST_TOKENS and dtype.itemsize == 2 and form.key_dim <= 2 * _HALF_KEY


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
    T, S, N, D = len(qkv_TC), rows.reads_S.shape[0], form.num_heads, form.value_dim
    inputs = (qkv_TC, decays_TN, rates_TN)
    strides = tuple(tensor.stride(0) for tensor in inputs)
    sizes = {
        "G": form.num_key_heads,
        "N": N,
        "F": form.key_dim,
        "DELTA": form.delta,
        "BLOCK_F": min(_HALF_KEY, max(16, triton.next_power_of_2(form.key_dim))),
    }
    solved_TNL, weights_TNL = (decays_TN.new_empty((T, N, _CHUNK.value)) for _ in range(2))
    prepared = (solved_TNL, weights_TNL, decays_TN.new_empty((T, N, 2)))
    _prepare_kernel[(T // _CHUNK.value + S, N)](
        *inputs,
        rows.query_starts_S1,
        *prepared,
        S,
        *strides,
        **sizes,
        num_warps=_NUM_WARPS,
    )
    _chunk_kernel[(triton.cdiv(D, _BLOCK_D.value), N, S)](
        *inputs,
        *prepared,
        layer.matrix_RNFD,
        rows.query_starts_S1,
        rows.reads_S,
        rows.writes_S,
        out_TX,
        *strides,
        layer.matrix_RNFD.stride(0),
        **sizes,
        D=D,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )
