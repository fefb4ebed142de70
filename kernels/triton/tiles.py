"""Launch constants, in one place, with the reasoning (they have not been tuned on a GPU yet).

`legato bench gpu` times alternatives; a measured table belongs here.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

# Programs to have in flight: two per multiprocessor of an H100/H200 hide each other's
# latency at the end of a tile; older GPUs have fewer multiprocessors and gain from more of them.
_FALLBACK_MULTIPROCESSORS = 132
_PROGRAMS_PER_MULTIPROCESSOR = 2
# The interpreter runs programs one after another: few, but enough that work is cut.
_INTERPRETED_MULTIPROCESSORS = 4


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """tokens * group <= rows; rows and block_k are powers of two, rows >= 16."""

    tokens: int
    rows: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodeTile:
    rows: int
    block_k: int
    num_warps: int
    num_stages: int


def _power_of_two_at_least(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def target_arch() -> int:
    """Compute capability the kernels are built for, 90 for Hopper (and where there is no GPU)."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@functools.cache
def prefill_tile(head_dim: int, group: int, dtype: torch.dtype, arch: int) -> PrefillTile:
    """128 rows keep two warpgroups of Hopper's tensor cores busy.

    Ampere's products take both operands from registers: with 128 features only a tile of 32
    positions fits without spilling (by the compiler's report). Wider heads and float32 get
    fewer rows for the same reason.
    """
    row_bytes = _power_of_two_at_least(head_dim) * dtype.itemsize
    rows = 128 if row_bytes <= 256 else 64 if row_bytes <= 512 else 32
    rows = max(rows, _power_of_two_at_least(group))
    roomy = row_bytes <= (256 if arch >= 90 else 128)
    return PrefillTile(
        tokens=rows // group,
        rows=rows,
        block_k=64 if roomy else 32,
        num_warps=8 if rows >= 128 else 4,
        num_stages=3 if roomy else 2,
    )


@functools.cache
def decode_tile(head_dim: int, group: int, dtype: torch.dtype) -> DecodeTile:
    """16 rows are the smallest matrix product; the tile of K is wide enough to stream."""
    row_bytes = _power_of_two_at_least(head_dim) * dtype.itemsize
    return DecodeTile(
        rows=max(16, _power_of_two_at_least(group)),
        block_k=64 if row_bytes <= 256 else 32,
        num_warps=4,
        num_stages=3 if row_bytes <= 256 else 2,
    )


@functools.cache
def _num_multiprocessors() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).multi_processor_count)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return _INTERPRETED_MULTIPROCESSORS
    return _FALLBACK_MULTIPROCESSORS


def num_programs() -> int:
    """Programs of a launch that shares its work out evenly among as many as run at once."""
    return _num_multiprocessors() * _PROGRAMS_PER_MULTIPROCESSOR


def splits_to_fill(count: int, most: int = 16) -> int:
    """Ways to cut the inner sum of a small product so that its programs fill the GPU."""
    splits = max(1, min(most, num_programs() // max(1, count)))
    return 1 << (splits.bit_length() - 1)
