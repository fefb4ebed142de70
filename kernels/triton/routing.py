"""Assignments of tokens to experts, sorted by expert into blocks of equal size, on the device.

An assignment is one of the K experts of one token, number `token * K + k`. No block has assignments
of two experts, so one product per block computes a whole mixture. The number of blocks depends on
sizes alone: a launch over all of them waits for nothing, and a captured one can be replayed over
another routing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_BLOCK_A = 1024


@triton.jit(do_not_specialize=["num_assignments"])
def _count_kernel(
    ids_ptr: tl.tensor, counts_ptr: tl.tensor, num_assignments: tl.tensor, BLOCK_A: tl.constexpr
) -> None:
    expert = tl.program_id(0)
    column = tl.arange(0, BLOCK_A)
    found_A = tl.zeros((BLOCK_A,), tl.int32)
    for base in range(0, num_assignments, BLOCK_A):
        a = base + column
        id_A = tl.load(ids_ptr + a, mask=a < num_assignments, other=-1)
        found_A += (id_A == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found_A, 0))


@triton.jit(do_not_specialize=["num_assignments", "num_blocks"])
def _place_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    num_assignments: tl.tensor,
    num_blocks: tl.tensor,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_A: tl.constexpr,
) -> None:
    # Each program sums the blocks of the experts before its own, which needs no synchronization
    # between programs.
    expert = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    blocks_E = tl.cdiv(tl.load(counts_ptr + e, mask=e < E, other=0), ROWS)
    first = tl.sum(tl.where(e < expert, blocks_E, 0), 0)
    end = tl.sum(tl.where(e <= expert, blocks_E, 0), 0)
    # The last expert's program also marks the blocks that are left over.
    last = tl.where(expert == E - 1, num_blocks, end)
    column = tl.arange(0, BLOCK_A)
    for base in range(first, last, BLOCK_A):
        block = base + column
        tl.store(experts_ptr + block, tl.where(block < end, expert, -1), mask=block < last)
    slots_ptr = rows_ptr + first * ROWS
    placed = 0
    for base in range(0, num_assignments, BLOCK_A):
        a = base + column
        is_ours_A = tl.load(ids_ptr + a, mask=a < num_assignments, other=-1) == expert
        ours_A = is_ours_A.to(tl.int32)
        tl.store(slots_ptr + placed + tl.cumsum(ours_A, 0) - 1, a, mask=is_ours_A)
        placed += tl.sum(ours_A, 0)
    slot = placed + tl.arange(0, ROWS)
    tl.store(slots_ptr + slot, slot * 0 - 1, mask=slot < (end - first) * ROWS)


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """experts_B: int32, the expert of each block; -1 for a block without work, whose rows are not
    written. rows_BR: int32, the assignments of each block in ascending order, then -1."""

    experts_B: torch.Tensor
    rows_BR: torch.Tensor

    @property
    def num_blocks(self) -> int:
        return self.experts_B.shape[0]


def most_blocks(num_assignments: int, num_experts: int, rows: int) -> int:
    """Blocks of `rows` that no routing of so many assignments exceeds."""
    used = min(num_assignments, num_experts)
    return used + (num_assignments - used) // rows


def sort_by_expert(topk_ids_TK: torch.Tensor, num_experts: int, rows: int) -> ExpertBlocks:
    """Blocks of `rows` assignments, a power of two; ids are contiguous integers below
    num_experts."""
    num_assignments, device = topk_ids_TK.numel(), topk_ids_TK.device
    num_blocks = most_blocks(num_assignments, num_experts, rows)
    counts_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    experts_B = torch.empty(num_blocks, dtype=torch.int32, device=device)
    rows_BR = torch.empty((num_blocks, rows), dtype=torch.int32, device=device)
    if num_assignments:
        _count_kernel[(num_experts,)](
            topk_ids_TK, counts_E, num_assignments, BLOCK_A=_BLOCK_A, num_warps=4
        )
        _place_kernel[(num_experts,)](
            topk_ids_TK,
            counts_E,
            experts_B,
            rows_BR,
            num_assignments,
            num_blocks,
            E=num_experts,
            BLOCK_E=triton.next_power_of_2(num_experts),
            ROWS=rows,
            BLOCK_A=_BLOCK_A,
            num_warps=4,
        )
    return ExpertBlocks(experts_B, rows_BR)
