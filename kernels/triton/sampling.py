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
from kernels.sampling import SamplingRows, or_minus_one
from kernels.torch.sampling import inverse_temperatures
from kernels.triton import threshold
from kernels.triton.depths import Chunks, bin_of, has_bin, intervals
from kernels.triton.gumbel import fold_block


@triton.jit(do_not_specialize=["row_stride", "first_id"])
def _draw_kernel(
    logits_ptr: tl.tensor,
    parameters_ptr: tl.tensor,
    key_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    places_ptr: tl.tensor,
    found_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    row_stride: tl.tensor,
    first_id: tl.tensor,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    """Draw among a chunk's tokens above the interval, and collect those in it."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    row_ptr = rows_ptr + row * 8
    raw_highest = tl.load(row_ptr)
    inverse = tl.load(parameters_ptr + row * 6 + 2)
    if (inverse > 0) & (tl.abs(raw_highest) < float("inf")):
        low = tl.load(row_ptr + 2).to(tl.int32)
        high = tl.load(row_ptr + 3).to(tl.int32)
        num = tl.load(row_ptr + 4)
        at = row * COUNT + chunk
        is_limited = (high >= low).to(tl.int32)
        before = tl.load(places_ptr + at * 3, mask=is_limited > 0, other=0)
        num_here = tl.load(places_ptr + at * 3 + 1, mask=is_limited > 0, other=0)
        num_above = tl.load(places_ptr + at * 3 + 2, mask=is_limited > 0, other=1)
        mass = tl.zeros((), tl.float32)
        score = tl.full((), -float("inf"), tl.float64)
        token = tl.full((), V, tl.int32)
        if num_here + num_above > 0:
            id_V = chunk * SIZE + tl.arange(0, SIZE)
            raw_V = tl.load(
                logits_ptr + row * row_stride + id_V, mask=id_V < V, other=-float("inf")
            )
            x_V = raw_V * inverse
            highest = raw_highest * inverse
            bin_V = bin_of(x_V, highest)
            if (num_here > 0) & (num <= MOST):
                inside_V = has_bin(x_V) & (bin_V >= low) & (bin_V <= high)
                place_V = before + tl.cumsum(inside_V.to(tl.int32), 0) - 1
                place_ptr_V = found_ptr + (row * MOST + place_V) * 2
                tl.store(place_ptr_V, raw_V, mask=inside_V)
                tl.store(place_ptr_V + 1, id_V.to(tl.float32, bitcast=True), mask=inside_V)
            if num_above > 0:
                # Without an interval all bins are above it.
                weight_V = tl.where(bin_V < low, tl.exp(x_V - highest), 0.0)
                mass = tl.sum(weight_V, 0)
                kept_V = (weight_V > 0) & (weight_V >= tl.load(parameters_ptr + row * 6 + 5))
                if tl.max(kept_V.to(tl.int32), 0) > 0:
                    key = tl.load(key_ptr + row * 3)
                    tolerance = 1e-3 + 1e-6 * tl.abs(highest)
                    score, token = fold_block(
                        raw_V, id_V, kept_V, inverse, key, score, token, tolerance, first_id
                    )
        tl.store(mass_ptr + at, mass)
        tl.store(score_ptr + at, score)
        tl.store(token_ptr + at, token)


def draw_rows(
    logits_RV: torch.Tensor, packed_R3: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 score and int32 token per row of a vocabulary shard that begins at first_id, on the
    device; no synchronization. packed_R3: see `pack_rows`."""
    R, V = logits_RV.shape
    device, chunks = logits_RV.device, Chunks.of(V)
    if not R:
        empty = torch.empty(0, device=device)
        return empty.double(), empty.int()
    parameters, keys = packed_R3.view(torch.float32), packed_R3.view(torch.int64)
    rows_R8, places_RC3 = intervals(logits_RV, parameters)
    most = min(threshold.MOST_COLLECTED, V)
    found_RM2 = torch.empty(R, most, 2, device=device)
    masses_RC = torch.empty(R, chunks.count, device=device)
    scores_RC = torch.empty(R, chunks.count, dtype=torch.float64, device=device)
    tokens_RC = torch.empty(R, chunks.count, dtype=torch.int32, device=device)
    _draw_kernel[(chunks.count, R)](
        logits_RV, parameters, keys, rows_R8, places_RC3, found_RM2, masses_RC, scores_RC,
        tokens_RC, logits_RV.stride(0), first_id, MOST=most, **chunks.chunk_constants,
    )  # fmt: skip
    return threshold.finish(
        logits_RV, parameters, keys, rows_R8, found_RM2, masses_RC, scores_RC, tokens_RC, first_id
    )


def sample_rows(logits_RV: torch.Tensor, packed_R3: torch.Tensor) -> torch.Tensor:
    """int32 token per row, as `draw_rows` of the whole vocabulary."""
    return draw_rows(logits_RV, packed_R3, 0)[1]


def gumbel_argmax(
    logits_SV: torch.Tensor, rows: SamplingRows, first_id: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """`kernels.torch.sampling.gumbel_argmax`; synchronizes with the GPU."""
    packed_R3 = torch.from_numpy(pack_rows(rows)).to(logits_SV.device, non_blocking=True)
    scores_S, tokens_S = draw_rows(logits_SV, packed_R3, first_id)
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
    drawn_S = or_minus_one(sample_rows(logits_SV, packed_R3), logits_SV)
    picked: NDArray[np.int64] = drawn_S.cpu().numpy().astype(np.int64)
    return picked
