"""The work list of decode attention, built on the device: equal work per program.

A unit is one tile of kv positions of one kv head. Units are ordered by slice, then head, then tile,
and each program takes an equal range of them. So a launch has as many programs as fill the GPU for
any batch and context length, and a captured launch can be replayed over other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionShape, Batch
from kernels.triton.prefill_tiles import PrefillTiles, list_tiles
from kernels.triton.tiles import decode_tile, num_programs, target_arch

_BLOCK_S = 128


@triton.jit
def context(
    starts_ptr: tl.tensor, s: tl.tensor, inside: tl.tensor, WINDOW: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """[begin, end) of the kv positions that the single token of slice s attends to."""
    end = tl.load(starts_ptr + s, mask=inside, other=0) + 1
    begin = end * 0
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0)
    if WINDOW < 0:
        begin = (end - 1) // -WINDOW * -WINDOW
    return begin, end


@triton.jit
def _tiles_of(
    starts_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    s: tl.tensor,
    num_slices: tl.tensor,
    BLOCK_K: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Tiles of each slice; 0 for padding (no token) and chunks (several tokens)."""
    begin, end = context(starts_ptr, s, s < num_slices, WINDOW)
    length = tl.load(lengths_ptr + s, mask=s < num_slices, other=0)
    return tl.where(length == 1, tl.cdiv(end - begin, BLOCK_K), 0)


@triton.jit(do_not_specialize=["num_slices"])
def _plan_kernel(
    starts_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    first_slice_ptr: tl.tensor,
    num_slices: tl.tensor,
    G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    # Each program sums all lengths itself, which needs no synchronization between programs.
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_S)
    total = 0
    for base in range(0, num_slices, BLOCK_S):
        s = base + column
        total += tl.sum(_tiles_of(starts_ptr, lengths_ptr, s, num_slices, BLOCK_K, WINDOW), 0)
    begin = program * tl.cdiv(total * G, tl.num_programs(0))
    before = 0
    first = 0
    for base in range(0, num_slices, BLOCK_S):
        s = base + column
        tiles_S = _tiles_of(starts_ptr, lengths_ptr, s, num_slices, BLOCK_K, WINDOW)
        end_S = before + tl.cumsum(tiles_S, 0)
        first += tl.sum(((end_S * G <= begin) & (s < num_slices)).to(tl.int32), 0)
        before += tl.sum(tiles_S, 0)
        if program == 0:
            tl.store(tile_starts_ptr + s + 1, end_S, mask=s < num_slices)
    tl.store(first_slice_ptr + program, first)


@dataclass(frozen=True, slots=True)
class WorkList:
    """tile_starts_S1: cumulative tiles of one head from 0. first_slice_P: the slice in which each
    program's range begins; S for a program without work."""

    tile_starts_S1: torch.Tensor
    first_slice_P: torch.Tensor

    @property
    def num_slices(self) -> int:
        return self.tile_starts_S1.shape[0] - 1

    @property
    def num_programs(self) -> int:
        return self.first_slice_P.shape[0]


def plan_work(batch: Batch, num_slices: int, shape: AttentionShape, dtype: torch.dtype) -> WorkList:
    """Work list of the one-token slices among the first `num_slices`."""
    device = batch.starts_S.device
    group = shape.num_heads // shape.num_kv_heads
    tile = decode_tile(shape.head_dim, group, dtype, target_arch())
    # Zeros, for nothing writes the first.
    tile_starts_S1 = torch.zeros(num_slices + 1, dtype=torch.int32, device=device)
    first_slice_P = torch.empty(num_programs(), dtype=torch.int32, device=device)
    _plan_kernel[(first_slice_P.shape[0],)](
        batch.starts_S,
        batch.lengths_S,
        tile_starts_S1,
        first_slice_P,
        num_slices,
        G=shape.num_kv_heads,
        BLOCK_K=tile.block_k,
        WINDOW=shape.window_code,
        BLOCK_S=_BLOCK_S,
        num_warps=4,
    )
    return WorkList(tile_starts_S1, first_slice_P)


class WorkLists:
    """Lists of the latest batch, built once for all layers: of decodes by their window, of prefill
    tiles by their size.

    A batch to be captured must be a new object, so that its lists are built inside the graph.
    """

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._lists: dict[tuple[object, ...], WorkList] = {}
        self._tiles: dict[tuple[int, ...], PrefillTiles] = {}

    def of(
        self, batch: Batch, num_slices: int, shape: AttentionShape, dtype: torch.dtype
    ) -> WorkList:
        """See `plan_work`."""
        self._begin(batch)
        key = (shape, dtype, num_slices)
        if key not in self._lists:
            self._lists[key] = plan_work(batch, num_slices, shape, dtype)
        return self._lists[key]

    def tiles_of(self, batch: Batch, *geometry: int) -> PrefillTiles:
        """See `list_tiles`."""
        self._begin(batch)
        if geometry not in self._tiles:
            self._tiles[geometry] = list_tiles(batch, *geometry)
        return self._tiles[geometry]

    def _begin(self, batch: Batch) -> None:
        if self._batch is not batch:
            self._batch, self._lists, self._tiles = batch, {}, {}
