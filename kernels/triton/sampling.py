"""Sampling on the GPU without sorting the vocabulary, with the semantics of
`kernels.torch.sampling`.

Rows are cut into chunks, a program each, so that a batch of few rows fills the GPU as well. top_k
and top_p keep the tokens above a threshold logit plus, among those equal to it, the lowest ids
(`threshold.py`). Among the kept ones the token is drawn by the Gumbel-max trick (`gumbel.py`). All
of it is launched whatever the rows ask for; programs of rows that need it not end at once.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kernels.random_stream import row_keys
from kernels.sampling import SamplingRows
from kernels.torch.sampling import inverse_temperatures
from kernels.triton.depths import Chunks, row_highest
from kernels.triton.gumbel import block_argmax, gumbel_scores, hash_of
from kernels.triton.threshold import thresholds

_BLOCK_DRAW = 1024  # scores are float64: more at once would take most registers


@triton.jit(do_not_specialize=["row_stride"])
def _highest_kernel(
    logits_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    row_stride: tl.tensor,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    id_V = chunk * SIZE + tl.arange(0, SIZE)
    x_V = tl.load(logits_ptr + row * row_stride + id_V, mask=id_V < V, other=-float("inf"))
    best = tl.max(x_V, 0)
    first = tl.min(tl.where((x_V == best) & (id_V < V), id_V, V), 0)
    out_ptr = highest_ptr + (row * COUNT + chunk) * 2
    tl.store(out_ptr, best)
    tl.store(out_ptr + 1, first.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["row_stride", "first_id"])
def _draw_kernel(
    logits_ptr: tl.tensor,
    parameters_ptr: tl.tensor,
    key_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    row_stride: tl.tensor,
    first_id: tl.tensor,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    raw_highest, token = row_highest(highest_ptr, row, V, COUNT, PADDED)
    inverse = tl.load(parameters_ptr + row * 6 + 2)
    score = raw_highest.to(tl.float64)
    if (inverse > 0) & (tl.abs(raw_highest) < float("inf")):
        min_p = tl.load(parameters_ptr + row * 6 + 5)
        threshold = tl.load(thresholds_ptr + row * 2)
        last_tie = tl.load(thresholds_ptr + row * 2 + 1).to(tl.int32, bitcast=True)
        key = tl.load(key_ptr + row * 3)
        highest = raw_highest * inverse
        # The highest token is kept in any case: its score bounds which others need one.
        score = gumbel_scores(raw_highest, inverse, hash_of(first_id + token, key))
        tolerance = 1e-3 + 1e-6 * tl.abs(highest)
        for begin in range(chunk * SIZE, chunk * SIZE + SIZE, BLOCK):
            id_N = begin + tl.arange(0, BLOCK)
            raw_N = tl.load(
                logits_ptr + row * row_stride + id_N, mask=id_N < V, other=-float("inf")
            )
            x_N = raw_N * inverse
            weight_N = tl.exp(x_N - highest)
            kept_N = (x_N > threshold) | ((x_N == threshold) & (id_N <= last_tie))
            kept_N = kept_N & (weight_N >= min_p) & (weight_N > 0)
            score, token = block_argmax(
                raw_N, id_N, kept_N, inverse, key, score, token, tolerance, first_id
            )
    tl.store(score_ptr + row * COUNT + chunk, score)
    tl.store(token_ptr + row * COUNT + chunk, token)


@triton.jit(do_not_specialize=["first_id"])
def _pick_kernel(
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    best_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_id: tl.tensor,
    V: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PADDED)
    score_C = tl.load(score_ptr + row * COUNT + c, mask=c < COUNT, other=-float("inf"))
    token_C = tl.load(token_ptr + row * COUNT + c, mask=c < COUNT, other=V)
    best = tl.max(score_C, 0)
    token = tl.min(tl.where(score_C == best, token_C, V), 0)
    tl.store(best_ptr + row, best)
    tl.store(out_ptr + row, first_id + tl.minimum(token, V - 1))


def _launch(
    logits_RV: torch.Tensor, packed_R3: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    R, V = logits_RV.shape
    device, chunks = logits_RV.device, Chunks.of(V)
    tokens_R = torch.empty(R, dtype=torch.int32, device=device)
    scores_R = torch.empty(R, dtype=torch.float64, device=device)
    if not R:
        return scores_R, tokens_R
    grid, stride = (chunks.count, R), logits_RV.stride(0)
    parameters = packed_R3.view(torch.float32)
    highest_RC2 = torch.empty(R, chunks.count, 2, device=device)
    _highest_kernel[grid](logits_RV, highest_RC2, stride, **chunks.chunk_constants)
    thresholds_R2 = thresholds(logits_RV, parameters, highest_RC2)
    scores_RC = torch.empty(R, chunks.count, dtype=torch.float64, device=device)
    tokens_RC = torch.empty(R, chunks.count, dtype=torch.int32, device=device)
    _draw_kernel[grid](
        logits_RV, parameters, packed_R3.view(torch.int64), highest_RC2, thresholds_R2, scores_RC,
        tokens_RC, stride, first_id, BLOCK=min(_BLOCK_DRAW, chunks.size), **chunks.chunk_constants,
    )  # fmt: skip
    _pick_kernel[(R,)](
        scores_RC, tokens_RC, scores_R, tokens_R, first_id, num_warps=1, **chunks.constants
    )
    return scores_R, tokens_R


def sample_rows(logits_RV: torch.Tensor, packed_R3: torch.Tensor) -> torch.Tensor:
    """int32 token per row, on the device; no synchronization. packed_R3: see `pack_rows`."""
    return _launch(logits_RV, packed_R3, 0)[1]


def gumbel_argmax(
    logits_SV: torch.Tensor, rows: SamplingRows, first_id: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """`kernels.torch.sampling.gumbel_argmax`; synchronizes with the GPU."""
    packed_R3 = torch.from_numpy(pack_rows(rows)).to(logits_SV.device, non_blocking=True)
    scores_S, tokens_S = _launch(logits_SV, packed_R3, first_id)
    return scores_S.cpu().numpy(), tokens_S.cpu().numpy().astype(np.int64)


def pack_rows(rows: SamplingRows) -> NDArray[np.float64]:
    """(R, 3) float64 for one transfer: column 0 holds the 64 bits of the row's key, columns 1 and 2
    float32 reciprocal of the temperature (0: greedy), top_k, top_p and min_p."""
    packed_R3 = np.empty((len(rows.temperature_S), 3), dtype=np.float64)
    packed_R3.view(np.uint64)[:, 0] = row_keys(rows.seed_S, rows.position_S)
    parameters_R4 = packed_R3.view(np.float32)[:, 2:]
    parameters_R4[:, 0] = inverse_temperatures(rows.temperature_S)
    parameters_R4[:, 1] = rows.top_k_S
    parameters_R4[:, 2] = rows.top_p_S
    parameters_R4[:, 3] = rows.min_p_S
    return packed_R3


def sample(logits_SV: torch.Tensor, rows: SamplingRows) -> NDArray[np.int64]:
    """One token id per row, as `kernels.torch.sampling.sample`; synchronizes with the GPU once."""
    packed_R3 = torch.from_numpy(pack_rows(rows)).to(logits_SV.device, non_blocking=True)
    picked: NDArray[np.int64] = sample_rows(logits_SV, packed_R3).cpu().numpy().astype(np.int64)
    return picked
