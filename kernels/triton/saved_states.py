"""Where slices save a state before their end: see `StateRows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.recurrence import StateRows


@triton.jit
def save_of(
    saves_ptr: tl.tensor, save_lengths_ptr: tl.tensor, s: tl.tensor, begin: tl.tensor,
    end: tl.tensor, num_saves: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The row in which slice s saves a state, before which token; else -1, and its end."""
    row = tl.load(saves_ptr + s, mask=s < num_saves, other=-1).to(tl.int64)
    length = tl.load(save_lengths_ptr + s, mask=s < num_saves, other=0)
    return row, tl.where(row >= 0, begin + length, end)


def saves_of(rows: StateRows) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows, lengths, and how many slices have them. So that one variant of a kernel does for all
    batches, it gets tensors, which it does not read, where no slice has any."""
    if rows.saves_S is None or rows.save_lengths_S is None:
        return rows.reads_S, rows.reads_S, 0
    return rows.saves_S, rows.save_lengths_S, rows.saves_S.shape[0]
