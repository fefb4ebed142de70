"""The interval of depths that holds the thresholds of top_k and top_p, by many programs a row.

Depth is the distance of a scaled logit from its row's highest. A row is cut into chunks, one
program each. Two passes count, up to each of 16 depths, the tokens of a chunk and what they weigh;
the second divides the interval that the first has found. The few tokens of the interval that is
left are collected in the order of their ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

# exp(-104) is 0 in float32: logits further below the highest have no probability to lose.
DEEPEST = tl.constexpr(104.0)
NUM_EDGES = tl.constexpr(16)
_WIDTH = 256  # tokens that are compared with all depths at once
_CHUNK = 4096  # 32 programs for a row of 128k tokens, each token in a register


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
        return {**self.constants, "SIZE": self.size, "num_warps": 8}


@triton.jit
def row_highest(
    highest_ptr: tl.tensor,
    row: tl.tensor,
    V: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The highest logit of a row and the lowest id that has it, from those of its chunks."""
    c = tl.arange(0, PADDED)
    chunk_ptr_C = highest_ptr + (row * COUNT + c) * 2
    best_C = tl.load(chunk_ptr_C, mask=c < COUNT, other=-float("inf"))
    id_C = tl.load(chunk_ptr_C + 1, mask=c < COUNT, other=0.0).to(tl.int32, bitcast=True)
    best = tl.max(best_C, 0)
    token = tl.min(tl.where((best_C == best) & (c < COUNT), id_C, V), 0)
    return best, tl.minimum(token, V - 1)  # without numbers none is the highest


@triton.jit
def is_searched(
    highest: tl.tensor, inverse: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, V: tl.constexpr
) -> tl.tensor:
    draws = (inverse > 0) & (tl.abs(highest) < float("inf"))
    return draws & (((top_k > 0) & (top_k < V)) | (top_p < 1))


@triton.jit
def _edge(low: tl.tensor, high: tl.tensor, j: tl.tensor, FIRST: tl.constexpr) -> tl.tensor:
    """The j-th of the depths that divide (low, high]; those of the first pass are close to each
    other near 0, where most of the weight is."""
    part = (j + 1).to(tl.float32) * (1.0 / NUM_EDGES)
    if FIRST:
        part = part * part * part
    begin = tl.maximum(low, 0.0)
    return tl.where(j == NUM_EDGES - 1, high, begin + (high - begin) * part)


@triton.jit
def _at(values_E: tl.tensor, index: tl.tensor) -> tl.tensor:
    return tl.sum(tl.where(tl.arange(0, NUM_EDGES) == index, values_E, 0.0), 0)


@triton.jit
def _narrowed(
    table_ptr: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    base_C: tl.tensor,
    base_mass: tl.tensor,
    total: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    V: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    FIRST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(low, high], narrowed by a pass: it holds the thresholds of both top_k and top_p.

    Also returns what is not deeper than low: how many tokens of each chunk, and their weight; how
    many tokens of each chunk are not deeper than high; and the weight of the whole row.
    """
    j = tl.arange(0, NUM_EDGES)
    c = tl.arange(0, PADDED)
    at_CE = c[:, None] * NUM_EDGES + j[None, :]
    inside_CE = (c < COUNT)[:, None] & (j >= 0)[None, :]
    count_CE = tl.load(table_ptr + at_CE, mask=inside_CE, other=0.0)
    mass_CE = tl.load(table_ptr + COUNT * NUM_EDGES + at_CE, mask=inside_CE, other=0.0)
    mass_E = tl.sum(mass_CE, 0)
    edge_E = _edge(low, high, j, FIRST)
    last = NUM_EDGES - 1
    if FIRST:
        total = _at(mass_E, last)
    by_count = (top_k > 0) & (top_k < V)
    fewer_E = (tl.sum(count_CE, 0) < top_k).to(tl.int32)
    index_k = tl.minimum(tl.sum(fewer_E, 0), last)
    # What top_k keeps weighs at least this much.
    least = tl.where(by_count, _at(mass_E, index_k - 1), total)
    lighter_E = (mass_E < least * top_p).to(tl.int32)
    index_low = tl.where(top_p < 1, tl.minimum(tl.sum(lighter_E, 0), last), index_k)
    index_high = tl.where(by_count, index_k, index_low)
    below_C = tl.sum(tl.where(j[None, :] == index_low - 1, count_CE, 0.0), 1)
    base_C = tl.where(index_low > 0, below_C, base_C)
    base_mass = tl.where(index_low > 0, _at(mass_E, index_low - 1), base_mass)
    up_to_C = tl.sum(tl.where(j[None, :] == index_high, count_CE, 0.0), 1)
    new_low = tl.where(index_low > 0, _at(edge_E, index_low - 1), low)
    return new_low, _at(edge_E, index_high), base_C, base_mass, up_to_C, total


@triton.jit
def interval(
    tables_ptr: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    V: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    NUM_PASSES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """As `_narrowed`, after so many passes. Below 0 a low end excludes nothing."""
    low = tl.full((), -1.0, tl.float32)
    high = tl.full((), DEEPEST, tl.float32)
    base_C = tl.zeros((PADDED,), tl.float32)
    up_to_C = base_C
    base_mass = tl.zeros((), tl.float32)
    total = base_mass
    if NUM_PASSES > 0:
        low, high, base_C, base_mass, up_to_C, total = _narrowed(
            tables_ptr, low, high, base_C, base_mass, total, top_k, top_p, V, COUNT, PADDED, True
        )
    if NUM_PASSES > 1:
        second_ptr = tables_ptr + 2 * COUNT * NUM_EDGES
        low, high, base_C, base_mass, up_to_C, total = _narrowed(
            second_ptr, low, high, base_C, base_mass, total, top_k, top_p, V, COUNT, PADDED, False
        )
    return low, high, base_C, base_mass, up_to_C, total


@triton.jit(do_not_specialize=["row_stride"])
def _weigh_kernel(
    logits_ptr: tl.tensor,
    parameters_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    row_stride: tl.tensor,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    PASS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    raw_highest, _highest_id = row_highest(highest_ptr, row, V, COUNT, PADDED)
    inverse = tl.load(parameters_ptr + row * 6 + 2)
    top_k = tl.load(parameters_ptr + row * 6 + 3)
    top_p = tl.load(parameters_ptr + row * 6 + 4)
    if is_searched(raw_highest, inverse, top_k, top_p, V):
        tables_ptr += row * (4 * COUNT * NUM_EDGES)
        low, high, _base_C, _base_mass, _up_to_C, _total = interval(
            tables_ptr, top_k, top_p, V, COUNT, PADDED, PASS
        )
        j_E = tl.arange(0, NUM_EDGES)
        edge_E1 = _edge(low, high, j_E, PASS == 0)[:, None]
        count_EW = tl.zeros((NUM_EDGES, WIDTH), tl.float32)
        mass_EW = tl.zeros((NUM_EDGES, WIDTH), tl.float32)
        for begin in range(chunk * SIZE, chunk * SIZE + SIZE, WIDTH):
            id_W = begin + tl.arange(0, WIDTH)
            raw_W = tl.load(
                logits_ptr + row * row_stride + id_W, mask=id_W < V, other=-float("inf")
            )
            depth_W = raw_highest * inverse - raw_W * inverse
            within_EW = depth_W[None, :] <= edge_E1
            count_EW += tl.where(within_EW, 1.0, 0.0)
            mass_EW += tl.where(within_EW, tl.exp(-depth_W)[None, :], 0.0)
        out_ptr = tables_ptr + PASS * (2 * COUNT * NUM_EDGES) + chunk * NUM_EDGES + j_E
        tl.store(out_ptr, tl.sum(count_EW, 1))
        tl.store(out_ptr + COUNT * NUM_EDGES, tl.sum(mass_EW, 1))


@triton.jit(do_not_specialize=["row_stride"])
def _collect_kernel(
    logits_ptr: tl.tensor,
    parameters_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    found_ptr: tl.tensor,
    row_stride: tl.tensor,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    raw_highest, _highest_id = row_highest(highest_ptr, row, V, COUNT, PADDED)
    inverse = tl.load(parameters_ptr + row * 6 + 2)
    top_k = tl.load(parameters_ptr + row * 6 + 3)
    top_p = tl.load(parameters_ptr + row * 6 + 4)
    if is_searched(raw_highest, inverse, top_k, top_p, V):
        tables_ptr += row * (4 * COUNT * NUM_EDGES)
        low, high, base_C, _base_mass, up_to_C, _total = interval(
            tables_ptr, top_k, top_p, V, COUNT, PADDED, 2
        )
        here_C = up_to_C - base_C
        if tl.sum(here_C, 0) <= MOST:
            before_C = tl.arange(0, PADDED) < chunk
            before = tl.sum(tl.where(before_C, here_C, 0.0), 0).to(tl.int32)
            id_V = chunk * SIZE + tl.arange(0, SIZE)
            raw_V = tl.load(
                logits_ptr + row * row_stride + id_V, mask=id_V < V, other=-float("inf")
            )
            depth_V = raw_highest * inverse - raw_V * inverse
            inside_V = (depth_V > low) & (depth_V <= high)
            place_V = before + tl.cumsum(inside_V.to(tl.int32), 0) - 1
            place_ptr_V = found_ptr + (row * MOST + place_V) * 2
            tl.store(place_ptr_V, raw_V, mask=inside_V)
            tl.store(place_ptr_V + 1, id_V.to(tl.float32, bitcast=True), mask=inside_V)


def collect(
    logits_RV: torch.Tensor, parameters: torch.Tensor, highest: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables for `interval`, and the tokens in it, up to `most` of a row: (R, most, 2) float32, raw
    logits and the bits of their ids. A row that has more is not collected.

    parameters: `sampling.pack_rows` as float32. highest: (R, chunks, 2) float32, each chunk's
    highest logit and the bits of the lowest id that has it.
    """
    R, V = logits_RV.shape
    chunks, device = Chunks.of(V), logits_RV.device
    tables = torch.empty(R, 2, 2, chunks.count, NUM_EDGES.value, device=device)
    found_RM2 = torch.empty(R, most, 2, device=device)
    rest = (parameters, highest, tables)
    grid, stride = (chunks.count, R), logits_RV.stride(0)
    for number in range(2):
        _weigh_kernel[grid](
            logits_RV, *rest, stride, PASS=number, WIDTH=min(_WIDTH, chunks.size),
            **chunks.chunk_constants,
        )  # fmt: skip
    _collect_kernel[grid](logits_RV, *rest, found_RM2, stride, MOST=most, **chunks.chunk_constants)
    return tables, found_RM2
