"""Sampling on the GPU without sorting the vocabulary, with the semantics of
`kernels.torch.sampling`.

top_k and top_p keep the tokens above a threshold logit plus, among those equal to it, the lowest
ids. The threshold is found by bisection over the row (which stays in the L2 cache); each pass moves
to the next logit that occurs, so a dozen passes give the exact result, where a sort would move the
row many times. The token is then drawn by the Gumbel-max trick (`gumbel.py`).
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
from kernels.triton.gumbel import block_argmax, gumbel_scores, hash_of

_BLOCK_V = 2048
# exp(-104) is 0 in float32: logits further below the highest have no probability to lose.
_DEEPEST = tl.constexpr(104.0)


@triton.jit
def _load_logits(
    row_ptr: tl.tensor, id_V: tl.tensor, V: tl.constexpr, inverse_temperature: tl.tensor
) -> tl.tensor:
    x = tl.load(row_ptr + id_V, mask=id_V < V, other=-float("inf")).to(tl.float32)
    return x * inverse_temperature


@triton.jit
def _highest(
    row_ptr: tl.tensor, V: tl.constexpr, BLOCK_V: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The highest logit of a row and the lowest id that has it."""
    column = tl.arange(0, BLOCK_V)
    best = tl.load(row_ptr).to(tl.float32)
    best_id = tl.zeros((), tl.int32)
    for begin in range(0, V, BLOCK_V):
        x = _load_logits(row_ptr, begin + column, V, 1.0)
        block_best = tl.max(x, 0)
        block_id = tl.min(tl.where(x == block_best, begin + column, V), 0)
        best_id = tl.where(block_best > best, block_id, best_id)
        best = tl.maximum(best, block_best)
    return best, best_id


@triton.jit
def _threshold(
    row_ptr: tl.tensor,
    inverse_temperature: tl.tensor,
    highest: tl.tensor,
    limit: tl.tensor,
    floor: tl.tensor,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> tl.tensor:
    """The lowest logit v >= floor whose strictly higher logits weigh less than `limit`.

    Weight is the number of tokens, or with BY_MASS the sum of exp(logit - highest).
    """
    column = tl.arange(0, BLOCK_V)
    kept = highest  # known to be kept; always a logit that occurs
    dropped = floor  # everything at or below is dropped, or needs no search
    searching = kept > dropped
    while searching:
        middle = dropped + (kept - dropped) * 0.5
        weight = 0.0
        at_most = dropped  # the highest logit <= middle
        above = kept  # the lowest logit > middle
        for begin in range(0, V, BLOCK_V):
            x = _load_logits(row_ptr, begin + column, V, inverse_temperature)
            is_above = x > middle
            unit = tl.exp(x - highest) if BY_MASS else 1.0
            weight += tl.sum(tl.where(is_above, unit, 0.0), 0)
            at_most = tl.maximum(at_most, tl.max(tl.where(is_above, dropped, x), 0))
            above = tl.minimum(above, tl.min(tl.where(is_above, x, kept), 0))
        keeps_more = weight < limit
        # No logit lies in (at_most, middle] or in (middle, above): jump over the gaps.
        exhausted = tl.where(keeps_more, at_most <= dropped, above >= kept)
        stuck = (middle <= dropped) | (middle >= kept)
        kept = tl.where(
            keeps_more & (at_most > dropped), at_most, tl.where(keeps_more, above, kept)
        )
        dropped = tl.where(keeps_more, dropped, middle)
        searching = (exhausted == 0) & (stuck == 0)
    return kept


@triton.jit
def _count_and_mass(
    row_ptr: tl.tensor,
    inverse_temperature: tl.tensor,
    highest: tl.tensor,
    threshold: tl.tensor,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Number and total weight of the tokens strictly above a threshold."""
    column = tl.arange(0, BLOCK_V)
    count = 0.0
    mass = 0.0
    for begin in range(0, V, BLOCK_V):
        x = _load_logits(row_ptr, begin + column, V, inverse_temperature)
        above = x > threshold
        count += tl.sum(tl.where(above, 1.0, 0.0), 0)
        mass += tl.sum(tl.where(above, tl.exp(x - highest), 0.0), 0)
    return count, mass


@triton.jit
def _kept_weights(
    x: tl.tensor,
    highest: tl.tensor,
    threshold: tl.tensor,
    ties_before: tl.tensor,
    num_ties: tl.tensor,
    min_p: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """exp(x - highest) of kept tokens of a block, 0 of others; and how many ties it holds."""
    tie = (x == threshold).to(tl.int32)
    tie_rank = ties_before + tl.cumsum(tie, 0)  # 1 for the first
    kept = (x > threshold) | ((tie == 1) & (tie_rank <= num_ties))
    weight = tl.exp(x - highest)
    return tl.where(kept & (weight >= min_p), weight, 0.0), tl.sum(tie, 0)


@triton.jit
def _sample_kernel(
    logits_ptr: tl.tensor,
    parameters_ptr: tl.tensor,
    key_ptr: tl.tensor,
    score_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    first_id: tl.tensor,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    raw_highest, token = _highest(row_ptr, V, BLOCK_V)
    score = raw_highest.to(tl.float64)
    inverse = tl.load(parameters_ptr + row * 6 + 2)
    if (inverse > 0) & (tl.abs(raw_highest) < float("inf")):
        top_k = tl.load(parameters_ptr + row * 6 + 3)
        top_p = tl.load(parameters_ptr + row * 6 + 4)
        min_p = tl.load(parameters_ptr + row * 6 + 5)
        highest = raw_highest * inverse
        floor = highest - _DEEPEST
        threshold = floor
        num_ties = V
        column = tl.arange(0, BLOCK_V)
        if top_k > 0:
            threshold = _threshold(row_ptr, inverse, highest, top_k, floor, V, BLOCK_V, False)
            above, mass_above = _count_and_mass(row_ptr, inverse, highest, threshold, V, BLOCK_V)
            num_ties = (top_k - above).to(tl.int32)
        if top_p < 1:
            total = 0.0
            ties = 0
            for begin in range(0, V, BLOCK_V):
                x = _load_logits(row_ptr, begin + column, V, inverse)
                weight, block_ties = _kept_weights(x, highest, threshold, ties, num_ties, 0.0)
                total += tl.sum(weight, 0)
                ties += block_ties
            nucleus = total * top_p
            by_mass = _threshold(row_ptr, inverse, highest, nucleus, floor, V, BLOCK_V, True)
            by_mass = tl.maximum(by_mass, threshold)
            above, mass_above = _count_and_mass(row_ptr, inverse, highest, by_mass, V, BLOCK_V)
            each = tl.exp(by_mass - highest)
            room = tl.ceil((nucleus - mass_above) / tl.maximum(each, 1e-37))
            wanted = tl.minimum(tl.maximum(room, 1.0), V * 1.0).to(tl.int32)
            num_ties = tl.where(by_mass > threshold, wanted, tl.minimum(wanted, num_ties))
            threshold = by_mass
        key = tl.load(key_ptr + row * 3)
        tolerance = 1e-3 + 1e-6 * tl.abs(highest)
        score = gumbel_scores(raw_highest, inverse, hash_of(first_id + token, key))
        ties = 0
        for begin in range(0, V, BLOCK_V):
            raw = _load_logits(row_ptr, begin + column, V, 1.0)
            x = raw * inverse
            weight, block_ties = _kept_weights(x, highest, threshold, ties, num_ties, min_p)
            ties += block_ties
            score, token = block_argmax(
                raw, begin + column, weight > 0, inverse, key, score, token, tolerance, first_id
            )
    tl.store(out_ptr + row, first_id + token)
    tl.store(score_ptr + row, score)


def _launch(
    logits_RV: torch.Tensor, packed_R3: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    R, V = logits_RV.shape
    tokens_R = torch.empty(R, dtype=torch.int32, device=logits_RV.device)
    scores_R = torch.empty(R, dtype=torch.float64, device=logits_RV.device)
    if R:
        _sample_kernel[(R,)](
            logits_RV,
            packed_R3.view(torch.float32),
            packed_R3.view(torch.int64),
            scores_R,
            tokens_R,
            logits_RV.stride(0),
            first_id,
            V=V,
            BLOCK_V=min(_BLOCK_V, triton.next_power_of_2(V)),
            num_warps=8,
            enable_fp_fusion=False,  # scores are defined operation by operation
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
