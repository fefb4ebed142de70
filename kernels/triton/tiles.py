"""Launch constants and their reasons. Those that name no measurement have not been tuned on a GPU
yet: `legato bench gpu` times alternatives."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

# Programs in flight: two per multiprocessor of an H100 or H200 hide each other's latency at the end
# of a tile.
_FALLBACK_MULTIPROCESSORS = 132
_PROGRAMS_PER_MULTIPROCESSOR = 2
# The interpreter runs programs serially: few, but enough that work is split.
_INTERPRETED_MULTIPROCESSORS = 4
ADAPTER_ROWS = 16  # of a tile: see `adapter_tile`
LEAST_ARCH = 80  # tiles take more shared memory than GPUs before it have
LEAST_ROUNDED_FLOAT8_ARCH = 89  # whose tensor cores multiply e4m3
# Shared memory that a program may take, by compute capability; of others at least the last.
_SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
_LEAST_SHARED_KIB = 99  # 8.6, 8.9, 12.0 and 12.1


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


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """rows of assignments by columns of weight rows, those of gate and up together."""

    rows: int
    columns: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PackedTile:
    """rows of tokens by columns of weight rows; programs per multiprocessor. weights_first: whether
    weights are the left operand, whose rows are the tensor core's."""

    rows: int
    columns: int
    weights_first: bool
    programs: int
    num_warps: int
    num_stages: int


_OTHER_SHARED_BYTES = 2048  # of attention, beside q, K and V, as compiled


@dataclass(frozen=True, slots=True)
class AdapterTile:
    """rows by columns of a layer's output; A x is summed over pieces of piece_k input features,
    block_k at once, which divides them."""

    rows: int
    columns: int
    piece_k: int
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


def most_shared_bytes(arch: int) -> int:
    """Shared memory that one program may take: on this GPU as its driver says, on others of a
    compute capability as CUDA documents."""
    if torch.cuda.is_available() and arch == target_arch():
        properties = torch.cuda.get_device_properties()
        if told := getattr(properties, "shared_memory_per_block_optin", 0):
            return int(told)
    return 1024 * _SHARED_KIB.get(arch, _LEAST_SHARED_KIB)


@functools.cache
def prefill_tile(head_dim: int, group: int, dtype: torch.dtype, arch: int) -> PrefillTile:
    """On Hopper 64 rows, one warpgroup: two programs share a multiprocessor, and one multiplies
    while the other is in its softmax. (On an H100, for a chunk of 2048, 128 rows take 1.08
    times as long, 256 rows 0.98, but twice as long for 512; tiles of 32 positions 1.09, of 128
    1.38; stages make no difference.)

    On Ampere both operands of an mma come from registers: with head_dim 128 only a tile of 32
    positions fits without spilling (by the compiler's report). Wider heads and float32 get
    fewer rows for the same reason, and the widest in float32 half the positions where a program
    may take 99 KiB of shared memory. So do those of latent attention anywhere, and eight warps, or
    their 576 features spill registers.
    """
    row_bytes = _power_of_two_at_least(head_dim) * dtype.itemsize
    narrow_rows = 64 if arch // 10 == 9 and dtype.itemsize == 2 else 128
    rows = narrow_rows if row_bytes <= 256 else 64 if row_bytes <= 512 else 32
    rows = max(rows, _power_of_two_at_least(group))
    roomy = row_bytes <= (256 if arch >= 90 else 128)
    small, huge = most_shared_bytes(arch) <= _LEAST_SHARED_KIB * 1024, row_bytes > 1024
    tight = huge or (small and row_bytes > 512)
    return PrefillTile(
        tokens=rows // group,
        rows=rows,
        block_k=64 if roomy else 16 if tight else 32,
        num_warps=8 if huge or rows >= 128 or (row_bytes > 512 and rows > 32) else 4,
        num_stages=3 if roomy else 1 if huge and small else 2,
    )


@functools.cache
def decode_tile(head_dim: int, group: int, dtype: torch.dtype, arch: int) -> DecodeTile:
    """16 rows are the smallest tl.dot. On an H100, at 1k and with two programs a multiprocessor,
    five stages take 2 % less than three with 128 requests, and as long with 32; three programs gain
    3 % with 128 and lose 5 % with 32. Latent attention takes fewer positions, as in prefill."""
    row_bytes = _power_of_two_at_least(head_dim) * dtype.itemsize
    small = most_shared_bytes(arch) <= _LEAST_SHARED_KIB * 1024
    tight = small and row_bytes > 512 and group > 16
    return DecodeTile(
        rows=max(16, _power_of_two_at_least(group)),
        block_k=64 if row_bytes <= 256 else 16 if tight or row_bytes > 1024 else 32,
        num_warps=8 if row_bytes > 1024 or (row_bytes > 512 and group > 32) else 4,
        num_stages=5 if row_bytes <= 256 else 1 if tight else 2,
    )


def unsupported_heads(head_dim: int, group: int, kv_bytes: int, arch: int) -> str | None:
    """Why attention of this many query heads to a key/value head cannot be computed, or None. One
    program holds them all, beside tiles of K and V; of latent attention, more than 32 spill.
    kv_bytes: of a cached number; products take two at least."""
    row_bytes, most = _power_of_two_at_least(head_dim) * max(2, kv_bytes), most_shared_bytes(arch)
    rows = max(16, _power_of_two_at_least(group))
    small = most <= _LEAST_SHARED_KIB * 1024
    kv_rows = 16 if small else 32 if row_bytes > 1024 else 64
    fits = (rows + kv_rows) * row_bytes + _OTHER_SHARED_BYTES <= most
    if row_bytes <= 512 or (fits and (row_bytes <= 1024 or rows <= 32)):
        return None
    return (
        f"{group} query heads of {head_dim} features to one key/value head are more than a program "
        f"with {most} bytes of shared memory holds; with more parallel.tensor_ranks, each has "
        "fewer heads"
    )


@functools.cache
def expert_tile(dtype: torch.dtype) -> ExpertTile:
    """One for all batches, so that a token's result does not depend on its neighbors.

    64 rows are the fewest that Hopper's tensor cores multiply, and at few tokens per expert their
    arithmetic still takes less time than to stream the weights. Three stages of 24 KiB let two
    programs share a multiprocessor. float32 has no tensor cores here and keeps to registers.
    """
    if dtype.itemsize > 2:
        return ExpertTile(rows=32, columns=64, block_k=32, num_warps=4, num_stages=2)
    return ExpertTile(rows=64, columns=128, block_k=64, num_warps=4, num_stages=3)


def most_fused_tokens(dtype: torch.dtype) -> int:
    """On an H100, 14336 x 4096 weights: 128 tokens take 58 us (int4) to 68 us (fp8), of which each
    program reads all; to dequantize for cuBLAS takes 53 to 63 us besides a product of 46."""
    return 128 if dtype.itemsize <= 2 else 64


@functools.cache
def packed_tile(tokens: int, kind: str, dtype: torch.dtype) -> PackedTile:
    """Measured on an H100, 14336 x 4096 weights, bfloat16.

    Up to 32 tokens 64 weight rows take 22 us for int4, 27 for int8 and 29 for fp8 at 16 tokens;
    weights on the left take a third longer. int4, of half the bytes, gains from twice the programs
    (21 us), the others lose. At 64 tokens, where warps would each convert the same weights, those
    on the left take 36 to 48 us instead of 44 to 51. At 128 a program takes a multiprocessor, and
    two for each cost more in partial sums (66 us) than the tail saves (58 us).
    """
    rows = max(16, _power_of_two_at_least(tokens))
    if dtype.itemsize > 2:  # products in float32 have no tensor cores and keep to registers
        # Three stages of 64 rows take 112 KiB of shared memory, which not all GPUs have.
        return PackedTile(rows, 64, False, 2, num_warps=4, num_stages=3 if rows <= 32 else 2)
    if rows > 64:
        return PackedTile(rows, 128, True, 1, num_warps=8, num_stages=3)
    programs = 4 if kind == "int4" and rows == 16 else 2
    return PackedTile(rows, 64, rows > 32, programs, num_warps=4, num_stages=4)


@functools.cache
def rounded_tile(tokens: int) -> PackedTile:
    """Of products of 8-bit codes with 8-bit inputs; programs 0: K is not split among programs.

    Up to 64 tokens weights are on the left, whose rows are 64 for Hopper's tensor cores. Beyond, 96
    KiB of shared memory fit the GPUs that have the least.
    """
    if tokens > 64:
        return PackedTile(128, 128, False, 0, num_warps=8, num_stages=3)
    rows = max(16, _power_of_two_at_least(tokens))
    return PackedTile(rows, 64, True, 2, num_warps=4, num_stages=4)


@functools.cache
def adapter_tile(dtype: torch.dtype) -> AdapterTile:
    """One for all batches, as for experts.

    16 rows are the smallest tl.dot: most runs are single decodes. A decode's few tiles would leave
    most of a GPU idle over thousands of input features, hence pieces; each of them adds float32
    sums that the second launch reads, hence few.
    """
    block_k = 128 if dtype.itemsize <= 2 else 64
    return AdapterTile(
        ADAPTER_ROWS, columns=128, piece_k=2048, block_k=block_k, num_warps=4, num_stages=3
    )


def recurrence_block(key_dim: int, value_dim: int) -> tuple[int, int]:
    """(F, D) of a matrix that a program of one warp holds in registers: 64 numbers a thread.

    All features of a key, since each token's sums run over them; in one warp these need no barrier.
    """
    block_f = _power_of_two_at_least(key_dim)
    return block_f, min(_power_of_two_at_least(value_dim), max(1, 2048 // block_f))


@functools.cache
def _num_multiprocessors() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties().multi_processor_count)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return _INTERPRETED_MULTIPROCESSORS
    return _FALLBACK_MULTIPROCESSORS


def num_programs() -> int:
    """Programs of a persistent launch: as many as run concurrently."""
    return _num_multiprocessors() * _PROGRAMS_PER_MULTIPROCESSOR


def stripe() -> int:
    """Programs of a launch that begin before any multiprocessor has its second; an even number."""
    return -(-_num_multiprocessors() // 2) * 2


def splits_to_fill(count: int, programs: int = _PROGRAMS_PER_MULTIPROCESSOR, most: int = 16) -> int:
    """Split-K factor, a power of two, that makes `count` programs fill the GPU with so many
    programs per multiprocessor."""
    splits = max(1, min(most, _num_multiprocessors() * programs // max(1, count)))
    return 1 << (splits.bit_length() - 1)
