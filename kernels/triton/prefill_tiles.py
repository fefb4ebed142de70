"""The tiles of prefill attention, listed on the device once per step.

A captured launch has programs for the most tiles that its batch may hold, of which most are empty.
An empty one leaves after one load of the list; if each program searched for its slice, as many
dependent loads as a search takes would cost a fifth of the kernel's time (measured on an H100 with
2048 tokens in 128 places for slices).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.interface import Batch

_BLOCK_S = 128


@triton.jit
def _tiles_of(
    lengths_ptr: tl.tensor,
    s: tl.tensor,
    num_slices: tl.tensor,
    num_decode_slots: tl.tensor,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """Tiles of each slice; 0 for those that the decode kernel serves, and for padding."""
    length = tl.load(lengths_ptr + s, mask=s < num_slices, other=0)
    is_decode = (length == 1) & (s < num_decode_slots)
    return tl.where(is_decode, 0, tl.cdiv(length, TOKENS))


@triton.jit(do_not_specialize=["first_slice", "num_slices", "num_decode_slots"])
def _list_kernel(
    lengths_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    slices_ptr: tl.tensor,
    first_slice: tl.tensor,
    num_slices: tl.tensor,
    num_decode_slots: tl.tensor,
    TOKENS: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    # Each program sums the tiles before its slice itself, which needs no synchronization.
    slice_ = first_slice + tl.program_id(0)
    column = tl.arange(0, BLOCK_S)
    before = 0
    for base in range(first_slice, slice_, BLOCK_S):
        s = base + column
        tiles_S = _tiles_of(lengths_ptr, s, slice_, num_decode_slots, TOKENS)
        before += tl.sum(tiles_S, 0)
    own = _tiles_of(lengths_ptr, slice_, num_slices, num_decode_slots, TOKENS)
    tl.store(tile_starts_ptr + slice_, before)
    if slice_ == num_slices - 1:
        tl.store(tile_starts_ptr + num_slices, before + own)
    for base in range(0, own, BLOCK_S):
        i = base + column
        tl.store(slices_ptr + before + i, i * 0 + slice_, mask=i < own)


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """tile_starts_S1: tiles before each slice, from the first that may be a chunk; last, their
    number. slices_X: the slice of each tile; X are the most that there can be."""

    tile_starts_S1: torch.Tensor
    slices_X: torch.Tensor

    @property
    def most(self) -> int:
        return self.slices_X.shape[0]


def list_tiles(
    batch: Batch, num_tokens: int, first_slice: int, num_decode_slots: int, tokens: int
) -> PrefillTiles:
    """Tiles of `tokens` tokens of the slices [first_slice, S) of a batch of `num_tokens`, but for
    slices of one token before `num_decode_slots`."""
    S = batch.starts_S.shape[0]
    device = batch.starts_S.device
    # Tokens before first_slice are decodes, one each; a slice's last tile may hold one token.
    most = (num_tokens - first_slice) // tokens + S - first_slice
    tiles = PrefillTiles(
        torch.empty(S + 1, dtype=torch.int32, device=device),
        torch.empty(most, dtype=torch.int32, device=device),
    )
    _list_kernel[(S - first_slice,)](
        batch.lengths_S,
        tiles.tile_starts_S1,
        tiles.slices_X,
        first_slice,
        S,
        num_decode_slots,
        TOKENS=tokens,
        BLOCK_S=_BLOCK_S,
        num_warps=1,
    )
    return tiles
