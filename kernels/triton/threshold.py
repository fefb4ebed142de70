"""The exact thresholds of top_k and top_p in each row, without a sort.

`depths` leaves an interval of few tokens, among which one program a row searches. Chunks and the
order of sums depend on the vocabulary alone, so a row has the same result in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.depths import (
    DEEPEST,
    NUM_EDGES,
    Chunks,
    collect,
    interval,
    is_searched,
    row_highest,
)

_MOST_COLLECTED = 16_384  # a wider interval, of an almost flat row, is searched in the row itself
_BLOCK_SEARCH = 2048


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
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A block of candidates: scaled logits, ids, and which of them are some."""
    i_N = begin + tl.arange(0, BLOCK)
    step = tl.where(are_collected, 2, 1)
    x_N = tl.load(ptr + i_N * step, mask=i_N < num, other=-float("inf")) * inverse
    num_ids = tl.where(are_collected, num, 0)
    bits_N = tl.load(ptr + i_N * step + 1, mask=i_N < num_ids, other=0.0)
    id_N = bits_N.to(tl.int32, bitcast=True)
    depth_N = scaled_highest - x_N
    return x_N, tl.where(are_collected, id_N, i_N), (depth_N > low) & (depth_N <= high)


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
        weight = base
        at_most = dropped  # the highest logit <= middle
        above = kept  # the lowest logit > middle
        for begin in range(0, num, BLOCK):
            x_N, _id_N, is_one_N = _candidates(
                ptr, begin, num, are_collected, scaled_highest, inverse, low, high, BLOCK
            )
            is_above_N = is_one_N & (x_N > middle)
            unit_N = tl.exp(x_N - scaled_highest) if BY_MASS else 1.0
            weight += tl.sum(tl.where(is_above_N, unit_N, 0.0), 0)
            is_below_N = is_one_N & (x_N <= middle)
            at_most = tl.maximum(at_most, tl.max(tl.where(is_below_N, x_N, dropped), 0))
            above = tl.minimum(above, tl.min(tl.where(is_above_N, x_N, kept), 0))
        keeps_more = weight < limit
        # No logit lies in (at_most, middle] or in (middle, above): jump over the gaps.
        exhausted = tl.where(keeps_more, at_most <= dropped, above >= kept)
        stuck = (middle <= dropped) | (middle >= kept)
        kept = tl.where(
            keeps_more & (at_most > dropped), at_most, tl.where(keeps_more, above, kept)
        )
        dropped = tl.where(keeps_more, dropped, middle)
        searching = (exhausted == 0) & (stuck == 0)
    count = 0.0
    mass = 0.0
    for begin in range(0, num, BLOCK):
        x_N, _id_N, is_one_N = _candidates(
            ptr, begin, num, are_collected, scaled_highest, inverse, low, high, BLOCK
        )
        is_above_N = is_one_N & (x_N > kept)
        count += tl.sum(tl.where(is_above_N, 1.0, 0.0), 0)
        mass += tl.sum(tl.where(is_above_N, tl.exp(x_N - scaled_highest), 0.0), 0)
    return kept, count, mass


@triton.jit(do_not_specialize=["row_stride"])
def _threshold_kernel(
    logits_ptr: tl.tensor,
    parameters_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    found_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    V: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    raw_highest, _highest_id = row_highest(highest_ptr, row, V, COUNT, PADDED)
    inverse = tl.load(parameters_ptr + row * 6 + 2)
    top_k = tl.load(parameters_ptr + row * 6 + 3)
    top_p = tl.load(parameters_ptr + row * 6 + 4)
    highest = raw_highest * inverse
    threshold = highest - DEEPEST
    last_tie = tl.full((), V, tl.int32)
    if is_searched(raw_highest, inverse, top_k, top_p, V):
        tables_ptr += row * (4 * COUNT * NUM_EDGES)
        low, high, base_C, base_mass, up_to_C, total = interval(
            tables_ptr, top_k, top_p, V, COUNT, PADDED, 2
        )
        base_count = tl.sum(base_C, 0)
        num = tl.sum(up_to_C - base_C, 0).to(tl.int32)
        are_collected = num <= MOST
        ptr = logits_ptr + row * row_stride
        if are_collected:
            ptr = found_ptr + row * (2 * MOST)
        else:
            num = tl.full((), V, tl.int32)
        top = -float("inf")
        bottom = float("inf")
        for begin in range(0, num, BLOCK):
            x_N, _id_N, is_one_N = _candidates(
                ptr, begin, num, are_collected, highest, inverse, low, high, BLOCK
            )
            top = tl.maximum(top, tl.max(tl.where(is_one_N, x_N, -float("inf")), 0))
            bottom = tl.minimum(bottom, tl.min(tl.where(is_one_N, x_N, float("inf")), 0))
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
                        x_N, _id_N, is_one_N = _candidates(
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
                x_N, id_N, is_one_N = _candidates(
                    ptr, begin, num, are_collected, highest, inverse, low, high, BLOCK
                )
                is_tie_N = is_one_N & (x_N == threshold)
                rank_N = ties + tl.cumsum(is_tie_N.to(tl.float32), 0)
                last_N = tl.where(is_tie_N & (rank_N <= num_ties), id_N, -1)
                last_tie = tl.maximum(last_tie, tl.max(last_N, 0))
                ties += tl.sum(is_tie_N.to(tl.float32), 0)
    tl.store(out_ptr + row * 2, threshold)
    tl.store(out_ptr + row * 2 + 1, last_tie.to(tl.float32, bitcast=True))


def thresholds(
    logits_RV: torch.Tensor, parameters: torch.Tensor, highest: torch.Tensor
) -> torch.Tensor:
    """(R, 2) float32: the lowest scaled logit that a row keeps, and the bits of the highest id
    (int32) kept among those equal to it. No synchronization. Arguments: see `depths.collect`."""
    R, V = logits_RV.shape
    most = min(_MOST_COLLECTED, V)
    tables, found_RM2 = collect(logits_RV, parameters, highest, most)
    out_R2 = torch.empty(R, 2, device=logits_RV.device)
    block = min(_BLOCK_SEARCH, triton.next_power_of_2(V))
    _threshold_kernel[(R,)](
        logits_RV, parameters, highest, tables, found_RM2, out_R2, logits_RV.stride(0), MOST=most,
        BLOCK=block, num_warps=8, **Chunks.of(V).constants,
    )  # fmt: skip
    return out_R2
