"""The interval of depths that holds the thresholds of top_k and top_p, by many programs a row.

Depth is the distance of a scaled logit from its row's highest. A row is cut into chunks, one
program each, which counts the chunk's tokens in bins of 1/8. No one knows the row's highest by
then: bins lie at multiples of 1/8 of the scaled logit itself, downward from the chunk's highest, so
those of all chunks are the same. A bin's weight follows from its count to a factor of exp(1/8);
that leaves a few bins which may hold a threshold (`_interval_kernel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

# exp(-104) is 0 in float32: logits further below the highest have no probability to lose.
DEEPEST = tl.constexpr(104.0)
# The last bin holds all that is deeper than 16, of at most exp(-16) of the highest's weight each.
NUM_BINS = tl.constexpr(128)
PER_UNIT = tl.constexpr(8.0)
# Scaled logits beyond have no bins. A row whose highest is beyond half of it is searched whole.
_WIDEST = tl.constexpr(262144.0)
# Added to a float32 less than 2**22, leaves its nearest integer in the last bits.
_ROUNDING = tl.constexpr(12582912.0)
_ROUNDED_ZERO = tl.constexpr(0x4B400000)
# More than are ever collected.
_UNCOUNTED = tl.constexpr(1.0e9)
# What sums in float32 may miss, relative to the weight of the row, with some room.
_SLACK = tl.constexpr(4e-6)
_CHUNK = 2048  # 63 programs for a row of 128k tokens; 4096 take too many registers to overlap


@dataclass(frozen=True, slots=True)
class Chunks:
    """A row of `width` tokens, cut into `count` chunks of `size`; the last may have fewer."""

    width: int
    size: int
    count: int

    @classmethod
    def of(cls, width: int) -> Chunks:
        size = min(_CHUNK, triton.next_power_of_2(width))
        return cls(width, size, -(-width // size))

    @property
    def constants(self) -> dict[str, Any]:
        """Those of kernels with one program per row."""
        padded = triton.next_power_of_2(self.count)
        # Results are defined operation by operation.
        return {"V": self.width, "COUNT": self.count, "PADDED": padded, "enable_fp_fusion": False}

    @property
    def chunk_constants(self) -> dict[str, Any]:
        """Those of kernels with one program per chunk."""
        constants = {"V": self.width, "COUNT": self.count, "SIZE": self.size}
        return {**constants, "enable_fp_fusion": False, "num_warps": 8}


@triton.jit
def _is_limited(
    inverse: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, V: tl.constexpr
) -> tl.tensor:
    return (inverse > 0) & (((top_k > 0) & (top_k < V)) | (top_p < 1))


@triton.jit
def has_bin(x: tl.tensor) -> tl.tensor:
    return x > -_WIDEST


@triton.jit
def _rounded(x: tl.tensor) -> tl.tensor:
    """The nearest multiple of 1 / PER_UNIT, as an integer: by adding, since conversions between
    integers and floats take four times as long."""
    x = tl.maximum(x, -_WIDEST)
    return (x * PER_UNIT + _ROUNDING).to(tl.int32, bitcast=True) - _ROUNDED_ZERO


@triton.jit
def bin_of(x: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """Bins of scaled logits below a highest one, int32; the first is 0."""
    below = _rounded(highest) - _rounded(x)
    return tl.minimum(tl.maximum(below, 0), NUM_BINS - 1)


@triton.jit(do_not_specialize=["row_stride"])
def _bin_kernel(
    logits_ptr: tl.tensor,
    parameters_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    row_stride: tl.tensor,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    id_V = chunk * SIZE + tl.arange(0, SIZE)
    raw_V = tl.load(logits_ptr + row * row_stride + id_V, mask=id_V < V, other=-float("inf"))
    # A maximum forgets NaN; infinity is no number that is drawn either.
    raw_V = tl.where(raw_V == raw_V, raw_V, float("inf"))
    best = tl.max(raw_V, 0)
    first = tl.min(tl.where((raw_V == best) & (id_V < V), id_V, V), 0)
    out_ptr = highest_ptr + (row * COUNT + chunk) * 4
    tl.store(out_ptr, best)
    tl.store(out_ptr + 1, first.to(tl.float32, bitcast=True))
    inverse = tl.load(parameters_ptr + row * 6 + 2)
    top_k = tl.load(parameters_ptr + row * 6 + 3)
    top_p = tl.load(parameters_ptr + row * 6 + 4)
    if _is_limited(inverse, top_k, top_p, V):
        highest = best * inverse
        x_V = raw_V * inverse
        counted_V = x_V > tl.where(tl.abs(highest) < _WIDEST, -_WIDEST, float("inf"))
        bin_V = tl.where(counted_V, bin_of(x_V, highest), 0)
        weight_V = tl.where(x_V > -float("inf"), tl.exp(x_V - highest), 0.0)
        tl.store(out_ptr + 2, tl.sum(weight_V, 0))
        tl.store(out_ptr + 3, tl.sum(tl.where(bin_V == NUM_BINS - 1, weight_V, 0.0), 0))
        count_B = tl.histogram(bin_V, NUM_BINS, mask=counted_V)
        b = tl.arange(0, NUM_BINS)
        tl.store(counts_ptr + (row * COUNT + chunk) * NUM_BINS + b, count_B)


@triton.jit
def _at(values_B: tl.tensor, index: tl.tensor) -> tl.tensor:
    return tl.sum(tl.where(tl.arange(0, NUM_BINS) == index, values_B, 0.0), 0)


@triton.jit
def _interval_kernel(
    parameters_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    places_ptr: tl.tensor,
    V: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Bounds of what the bins weigh, from their ends; of what lies deeper, as the chunks have
    summed it."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PADDED)
    highest_ptr_C = highest_ptr + (row * COUNT + c) * 4
    best_C = tl.load(highest_ptr_C, mask=c < COUNT, other=-float("inf"))
    id_C = tl.load(highest_ptr_C + 1, mask=c < COUNT, other=0.0).to(tl.int32, bitcast=True)
    raw_highest = tl.max(best_C, 0)
    token = tl.min(tl.where((best_C == raw_highest) & (c < COUNT), id_C, V), 0)
    token = tl.minimum(token, V - 1)  # without numbers none is the highest
    out_ptr = rows_ptr + row * 8
    tl.store(out_ptr, raw_highest)
    tl.store(out_ptr + 1, token.to(tl.float32, bitcast=True))
    # No bin is searched, and all are above those that are.
    tl.store(out_ptr + 2, NUM_BINS * 1.0)
    tl.store(out_ptr + 3, -1.0)
    inverse = tl.load(parameters_ptr + row * 6 + 2)
    top_k = tl.load(parameters_ptr + row * 6 + 3)
    top_p = tl.load(parameters_ptr + row * 6 + 4)
    highest = raw_highest * inverse
    if _is_limited(inverse, top_k, top_p, V) & (tl.abs(raw_highest) < float("inf")):
        last = NUM_BINS - 1
        b = tl.arange(0, NUM_BINS)
        at_C = (row * COUNT + c) * NUM_BINS
        inside_CB = (c < COUNT)[:, None] & (b < last)[None, :]
        x_C = best_C * inverse
        has_bins_C = (c < COUNT) & has_bin(x_C)
        top_C = tl.where(has_bins_C, _rounded(x_C), 0)
        top = _rounded(highest)
        # How many bins a chunk begins below the row.
        shift_C = tl.where(has_bins_C, tl.minimum(tl.maximum(top - top_C, 0), NUM_BINS), 0)
        own_CB = tl.load(
            counts_ptr + at_C[:, None] + b[None, :], mask=(c < COUNT)[:, None], other=0
        )
        index_CB = b[None, :] - shift_C[:, None]
        count_CB = tl.load(
            counts_ptr + at_C[:, None] + index_CB, mask=inside_CB & (index_CB >= 0), other=0
        )
        own_C = tl.sum(own_CB, 1)
        count_B = tl.sum(count_CB, 0).to(tl.float32)
        up_to_B = tl.cumsum(count_B, 0)
        # A bin ends 1 / PER_UNIT above where it begins.
        begin_B = ((top - b).to(tl.float32) - 0.5) * (1.0 / PER_UNIT) - highest
        begin_B = tl.minimum(begin_B, 0.0)
        least_B = tl.exp(begin_B)
        most_B = tl.exp(tl.minimum(begin_B + 1.0 / PER_UNIT, 0.0))
        low_B = tl.cumsum(count_B * least_B, 0)
        high_B = tl.cumsum(count_B * most_B, 0)
        # Tokens with a bin in their chunk, but none in the row.
        is_out_CB = inside_CB & (b[None, :] + shift_C[:, None] >= last)
        deep_CB = ((top_C[:, None] - b[None, :]).to(tl.float32) + 0.5) * (1.0 / PER_UNIT) - highest
        deep_CB = tl.exp(tl.minimum(deep_CB, 0.0)) * own_CB.to(tl.float32)
        deep = tl.sum(tl.sum(tl.where(is_out_CB, deep_CB, 0.0), 1), 0)
        weight_C = tl.load(highest_ptr_C + 2, mask=c < COUNT, other=0.0)
        rest_C = tl.load(highest_ptr_C + 3, mask=c < COUNT, other=0.0)
        scale_C = tl.where(x_C > -float("inf"), tl.exp(x_C - highest), 0.0)
        total = tl.sum(weight_C * scale_C, 0)
        deep += tl.sum(rest_C * scale_C, 0)
        deep_low_B = tl.max(low_B, 0) - low_B
        deep_high_B = tl.max(high_B, 0) - high_B + deep
        slack = _SLACK * total
        is_bin_B = b < last
        by_count = (top_k > 0) & (top_k < V)
        index_k = tl.sum((is_bin_B & (up_to_B < top_k)).to(tl.int32), 0)
        # What top_k keeps weighs at least this much.
        kept = tl.where(by_count, _at(low_B, index_k - 1), total)
        nucleus = kept * top_p
        above_B = high_B < nucleus - slack
        may_be_above_B = low_B < nucleus + slack
        if by_count == 0:
            outside = (1.0 - top_p) * total
            above_B = above_B | (deep_low_B > outside + slack)
            may_be_above_B = may_be_above_B & (deep_high_B > outside - slack)
        begin = tl.sum((is_bin_B & above_B).to(tl.int32), 0)
        begin = tl.where(by_count, tl.where(top_p < 1, tl.minimum(begin, index_k), index_k), begin)
        end = tl.where(by_count, index_k, tl.sum((is_bin_B & may_be_above_B).to(tl.int32), 0))
        # Tokens of the interval in chunks before, and here; and tokens above it.
        is_in_B = (b >= begin) & (b <= end)
        here_C = tl.sum(tl.where(is_in_B[None, :], count_CB, 0), 1)
        here_C += tl.where(end == last, own_C - tl.sum(count_CB, 1), 0)
        above_C = tl.sum(tl.where((b < begin)[None, :], count_CB, 0), 1)
        num = tl.sum(here_C, 0).to(tl.float32)
        if tl.abs(highest) >= _WIDEST * 0.5:
            begin = begin * 0
            end = begin + last
            here_C *= 0
            above_C *= 0
            num = num * 0.0 + _UNCOUNTED
        place_ptr_C = places_ptr + (row * COUNT + c) * 3
        tl.store(place_ptr_C, tl.cumsum(here_C, 0) - here_C, mask=c < COUNT)
        tl.store(place_ptr_C + 1, here_C, mask=c < COUNT)
        tl.store(place_ptr_C + 2, above_C, mask=c < COUNT)
        tl.store(out_ptr + 2, begin.to(tl.float32))
        tl.store(out_ptr + 3, end.to(tl.float32))
        tl.store(out_ptr + 4, num)
        tl.store(out_ptr + 5, tl.sum(above_C, 0).to(tl.float32))
        tl.store(out_ptr + 6, total)


def intervals(
    logits_RV: torch.Tensor, parameters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two launches; no synchronization.

    parameters: `sampling.pack_rows` as float32.

    Returns:
        (R, 8) float32: the highest logit, the bits of the lowest id that has it, the first and the
        last bin that may hold a threshold (where none is searched, all bins are above), how many
        tokens they have, how many are above, the weight of all tokens, and nothing.
        (R, chunks, 3) int32: how many tokens these bins have before a chunk, and in it; how many of
        the chunk are above. Without an interval nothing.
    """
    R, V = logits_RV.shape
    chunks, device = Chunks.of(V), logits_RV.device
    highest_RC4 = torch.empty(R, chunks.count, 4, device=device)
    counts_RCB = torch.empty(R, chunks.count, NUM_BINS.value, dtype=torch.int32, device=device)
    _bin_kernel[(chunks.count, R)](
        logits_RV, parameters, highest_RC4, counts_RCB, logits_RV.stride(0),
        **chunks.chunk_constants,
    )  # fmt: skip
    rows_R8 = torch.empty(R, 8, device=device)
    places_RC3 = torch.empty(R, chunks.count, 3, dtype=torch.int32, device=device)
    _interval_kernel[(R,)](
        parameters, highest_RC4, counts_RCB, rows_R8, places_RC3, num_warps=8, **chunks.constants
    )
    return rows_R8, places_RC3
