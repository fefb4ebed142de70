"""Launch constants, in one place, with the reasoning (they have not been tuned on a GPU yet).

`legato bench gpu` times alternatives; a measured table belongs here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

# Programs to have in flight: two per multiprocessor of an H100/H200 hide each other's
# latency at the end of a tile; older GPUs have fewer multiprocessors and gain from more of them.
_FALLBACK_MULTIPROCESSORS = 132
_PROGRAMS_PER_MULTIPROCESSOR = 2
# One request must not hold the whole batch: even in a full batch a context longer than this
# many positions per program is split further.
_LONGEST_PART = 4096
_MOST_SPLITS = 64


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
    return _FALLBACK_MULTIPROCESSORS


@dataclass(frozen=True, slots=True)
class KVSplits:
    """At most `count` parts per context, each a multiple of `granule` positions."""

    count: int
    granule: int


def kv_splits(num_programs: int, longest_context: int, block_k: int) -> KVSplits:
    """How finely contexts are cut; `count` is a power of two (few variants to compile).

    num_programs: what the launch would have without splitting (requests * kv heads). A batch
    that fills the GPU by itself cuts only long contexts: parts cost a merge.
    """
    target = _num_multiprocessors() * _PROGRAMS_PER_MULTIPROCESSOR
    to_fill = -(-target // max(1, num_programs))
    granule = block_k if to_fill >= 4 else 256 if to_fill >= 2 else 1024
    wanted = max(to_fill, -(-longest_context // _LONGEST_PART))
    count = max(1, min(wanted, -(-longest_context // granule), _MOST_SPLITS))
    return KVSplits(_power_of_two_at_least(count), granule)


def splits_to_fill(num_programs: int, most: int = 16) -> int:
    """Ways to cut the inner sum of a small product so that its programs fill the GPU."""
    target = _num_multiprocessors() * _PROGRAMS_PER_MULTIPROCESSOR
    splits = max(1, min(most, target // max(1, num_programs)))
    return 1 << (splits.bit_length() - 1)
