"""The exact thresholds of top_k and top_p in a row, without a sort, and the row's token.

`depths` leaves an interval of few tokens, among which one program a row searches; it then draws
among those that are kept. Chunks and the order of sums depend on the vocabulary alone, so a row has
the same result in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.depths import DEEPEST, Chunks, bin_of
from kernels.triton.gumbel import fold_block, gumbel_scores, hash_of

MOST_COLLECTED = 16_384  # a wider interval, of an almost flat row, is searched in the row itself
_BLOCK_SEARCH = 1024


@triton.jit
def _candidates(
    ptr: tl.tensor,
    begin: tl.tensor,
    num: tl.tensor,
    are_collected: tl.tensor,
    scaled_highest: tl.tensor,
    inverse: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A block of candidates: logits, scaled logits, ids, and which of them are some."""
    i_N = begin + tl.arange(0, BLOCK)
    step = tl.where(are_collected, 2, 1)
    raw_N = tl.load(ptr + i_N * step, mask=i_N < num, other=-float("inf"))
    x_N = raw_N * inverse
    num_ids = tl.where(are_collected, num, 0)
    bits_N = tl.load(ptr + i_N * step + 1, mask=i_N < num_ids, other=0.0)
    id_N = bits_N.to(tl.int32, bitcast=True)
    bin_N = bin_of(x_N, scaled_highest)
    is_one_N = (bin_N >= low) & (bin_N <= high) & (scaled_highest - x_N <= DEEPEST)
    return raw_N, x_N, tl.where(are_collected, id_N, i_N), is_one_N


@triton.jit
def _search(
    ptr: tl.tensor,
    num: tl.tensor,
    are_collected: tl.tensor,
    scaled_highest: tl.tensor,
    inverse: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    kept: tl.tensor,
    dropped: tl.tensor,
    base: tl.tensor,
    limit: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The lowest candidate whose strictly higher tokens weigh less than `limit`, with the number
    and the weight of the candidates above it.

    kept: the highest candidate; dropped: less than all of them. base: what is above them all.
    Weight is the number of tokens, or with BY_MASS the sum of exp(x - highest).
    """
    searching = kept > dropped
    while searching:
        middle = dropped + (kept - dropped) * 0.5
        # Reduced after the last block: a reduction takes longer than the rest of a block.
        weight_N = tl.zeros((BLOCK,), tl.float32)
        at_most_N = tl.zeros((BLOCK,), tl.float32) + dropped  # the highest logit <= middle
        above_N = tl.zeros((BLOCK,), tl.float32) + kept  # the lowest logit > middle
        for begin in range(0, num, BLOCK):
            _raw_N, x_N, _id_N, is_one_N = _candidates(
                ptr, begin, num, are_collected, scaled_highest, inverse, low, high, BLOCK
            )
            is_above_N = is_one_N & (x_N > middle)
            unit_N = tl.exp(x_N - scaled_highest) if BY_MASS else 1.0
            weight_N += tl.where(is_above_N, unit_N, 0.0)
            is_below_N = is_one_N & (x_N <= middle)
            at_most_N = tl.maximum(at_most_N, tl.where(is_below_N, x_N, dropped))
            above_N = tl.minimum(above_N, tl.where(is_above_N, x_N, kept))
        weight = base + tl.sum(weight_N, 0)
        at_most = tl.max(at_most_N, 0)
        above = tl.min(above_N, 0)
        keeps_more = weight < limit
        # No logit lies in (at_most, middle] or in (middle, above): jump over the gaps.
        exhausted = tl.where(keeps_more, at_most <= dropped, above >= kept)
        stuck = (middle <= dropped) | (middle >= kept)
        kept = tl.where(
            keeps_more & (at_most > dropped), at_most, tl.where(keeps_more, above, kept)
        )
        dropped = tl.where(keeps_more, dropped, middle)
        searching = (exhausted == 0) & (stuck == 0)
    count_N = tl.zeros((BLOCK,), tl.float32)
    mass_N = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, num, BLOCK):
        _raw_N, x_N, _id_N, is_one_N = _candidates(
            ptr, begin, num, are_collected, scaled_highest, inverse, low, high, BLOCK
        )
        is_above_N = is_one_N & (x_N > kept)
        count_N += tl.where(is_above_N, 1.0, 0.0)
        mass_N += tl.where(is_above_N, tl.exp(x_N - scaled_highest), 0.0)
    return kept, tl.sum(count_N, 0), tl.sum(mass_N, 0)


@triton.jit
def _threshold(
    ptr: tl.tensor,
    num: tl.tensor,
    are_collected: tl.tensor,
    highest: tl.tensor,
    inverse: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    base_count: tl.tensor,
    base_mass: tl.tensor,
    total: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The lowest scaled logit that a row keeps, and the highest id kept among those equal to it."""
    threshold = highest - DEEPEST
    last_tie = tl.full((), V, tl.int32)
    top_N = tl.full((BLOCK,), -float("inf"), tl.float32)
    bottom_N = tl.full((BLOCK,), float("inf"), tl.float32)
    for begin in range(0, num, BLOCK):
        _raw_N, x_N, _id_N, is_one_N = _candidates(
            ptr, begin, num, are_collected, highest, inverse, low, high, BLOCK
        )
        top_N = tl.maximum(top_N, tl.where(is_one_N, x_N, -float("inf")))
        bottom_N = tl.minimum(bottom_N, tl.where(is_one_N, x_N, float("inf")))
    top = tl.max(top_N, 0)
    bottom = tl.min(bottom_N, 0)
    if top > -float("inf"):
        under = bottom - (1e-3 + 1e-3 * tl.abs(bottom))
        num_ties = V * 1.0
        if (top_k > 0) & (top_k < V):
            threshold, count, _mass = _search(
                ptr, num, are_collected, highest, inverse, low, high, top, under,
                base_count, top_k, False, BLOCK,
            )  # fmt: skip
            num_ties = top_k - base_count - count
        if top_p < 1:
            if (top_k > 0) & (top_k < V):
                total = base_mass
                ties = 0.0
                for begin in range(0, num, BLOCK):
                    _raw_N, x_N, _id_N, is_one_N = _candidates(
                        ptr, begin, num, are_collected, highest, inverse, low, high, BLOCK
                    )
                    is_tie_N = is_one_N & (x_N == threshold)
                    rank_N = ties + tl.cumsum(is_tie_N.to(tl.float32), 0)
                    is_kept_N = is_one_N & (x_N > threshold) | is_tie_N & (rank_N <= num_ties)
                    total += tl.sum(tl.where(is_kept_N, tl.exp(x_N - highest), 0.0), 0)
                    ties += tl.sum(is_tie_N.to(tl.float32), 0)
            nucleus = total * top_p
            by_mass, _count, mass = _search(
                ptr, num, are_collected, highest, inverse, low, high, top, under,
                base_mass, nucleus, True, BLOCK,
            )  # fmt: skip
            if by_mass >= threshold:
                each = tl.exp(by_mass - highest)
                room = tl.ceil((nucleus - base_mass - mass) / tl.maximum(each, 1e-37))
                wanted = tl.minimum(tl.maximum(room, 1.0), V * 1.0)
                is_higher = by_mass > threshold
                num_ties = tl.where(is_higher, wanted, tl.minimum(wanted, num_ties))
                threshold = by_mass
        ties = 0.0
        last_tie = tl.full((), -1, tl.int32)
        for begin in range(0, num, BLOCK):
            _raw_N, x_N, id_N, is_one_N = _candidates(
                ptr, begin, num, are_collected, highest, inverse, low, high, BLOCK
            )
            is_tie_N = is_one_N & (x_N == threshold)
            rank_N = ties + tl.cumsum(is_tie_N.to(tl.float32), 0)
            last_N = tl.where(is_tie_N & (rank_N <= num_ties), id_N, -1)
            last_tie = tl.maximum(last_tie, tl.max(last_N, 0))
            ties += tl.sum(is_tie_N.to(tl.float32), 0)
    return threshold, last_tie


@triton.jit(do_not_specialize=["row_stride", "first_id"])
def _finish_kernel(
    logits_ptr: tl.tensor,
    parameters_ptr: tl.tensor,
    key_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    found_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    best_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    first_id: tl.tensor,
    V: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    row_ptr = rows_ptr + row * 8
    raw_highest = tl.load(row_ptr)
    token = tl.load(row_ptr + 1).to(tl.int32, bitcast=True)
    inverse = tl.load(parameters_ptr + row * 6 + 2)
    score = raw_highest.to(tl.float64)
    if (inverse > 0) & (tl.abs(raw_highest) < float("inf")):
        key = tl.load(key_ptr + row * 3)
        # The highest token is kept in any case.
        score = gumbel_scores(raw_highest, inverse, hash_of(first_id + token, key))
        c = tl.arange(0, PADDED)
        at_C = row * COUNT + c
        score_C = tl.load(score_ptr + at_C, mask=c < COUNT, other=-float("inf"))
        token_C = tl.load(token_ptr + at_C, mask=c < COUNT, other=V)
        best = tl.max(score_C, 0)
        first = tl.min(tl.where(score_C == best, token_C, V), 0)
        better = (best > score) | ((best == score) & (first < token))
        score = tl.where(better, best, score)
        token = tl.where(better, first, token)
        low = tl.load(row_ptr + 2).to(tl.int32)
        high = tl.load(row_ptr + 3).to(tl.int32)
        num = tl.load(row_ptr + 4).to(tl.int32)
        if high >= low:
            highest = raw_highest * inverse
            mass_C = tl.load(mass_ptr + at_C, mask=c < COUNT, other=0.0)
            are_collected = num <= MOST
            ptr = logits_ptr + row * row_stride
            if are_collected:
                ptr = found_ptr + row * (2 * MOST)
            else:
                num = tl.full((), V, tl.int32)
            threshold, last_tie = _threshold(
                ptr, num, are_collected, highest, inverse, low, high, tl.load(row_ptr + 5),
                tl.sum(mass_C, 0), tl.load(row_ptr + 6), tl.load(parameters_ptr + row * 6 + 3),
                tl.load(parameters_ptr + row * 6 + 4), V, BLOCK,
            )  # fmt: skip
            min_p = tl.load(parameters_ptr + row * 6 + 5)
            tolerance = 1e-3 + 1e-6 * tl.abs(highest)
            for begin in range(0, num, BLOCK):
                raw_N, x_N, id_N, is_one_N = _candidates(
                    ptr, begin, num, are_collected, highest, inverse, low, high, BLOCK
                )
                weight_N = tl.exp(x_N - highest)
                kept_N = (x_N > threshold) | ((x_N == threshold) & (id_N <= last_tie))
                kept_N = is_one_N & kept_N & (weight_N >= min_p) & (weight_N > 0)
                score, token = fold_block(
                    raw_N, id_N, kept_N, inverse, key, score, token, tolerance, first_id
                )
    tl.store(best_ptr + row, score)
    tl.store(out_ptr + row, first_id + token)


def finish(
    logits_RV: torch.Tensor,
    parameters: torch.Tensor,
    keys: torch.Tensor,
    rows_R8: torch.Tensor,
    found_RM2: torch.Tensor,
    masses_RC: torch.Tensor,
    scores_RC: torch.Tensor,
    tokens_RC: torch.Tensor,
    first_id: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(R,) float64 scores and int32 tokens; one launch, no synchronization. Arguments: see
    `depths.intervals` and `sampling`."""
    R, V = logits_RV.shape
    device = logits_RV.device
    scores_R = torch.empty(R, dtype=torch.float64, device=device)
    tokens_R = torch.empty(R, dtype=torch.int32, device=device)
    _finish_kernel[(R,)](
        logits_RV, parameters, keys, rows_R8, found_RM2, masses_RC, scores_RC, tokens_RC, scores_R,
        tokens_R, logits_RV.stride(0), first_id, MOST=found_RM2.shape[1],
        BLOCK=min(_BLOCK_SEARCH, triton.next_power_of_2(V)), num_warps=8,
        **Chunks.of(V).constants,
    )  # fmt: skip
    return scores_R, tokens_R
