"""Hybrid batches with scattered block tables, for checks and timings without an engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kernels.interface import Batch


def hybrid_batch(
    starts: Sequence[int], lengths: Sequence[int], block_size: int, device: torch.device | str
) -> tuple[Batch, int]:
    """A batch of slices (start, length), and how many cache blocks its tables need.

    Blocks of all requests are shuffled together, so neighbors in a context lie apart in
    memory. One-token slices that lead are the decodes.
    """
    num_slices = len(starts)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    width = max(-(-end // block_size) for end in ends)
    num_blocks = num_slices * width + 1
    generator = torch.Generator().manual_seed(num_blocks)
    tables = torch.randperm(num_blocks, generator=generator)[: num_slices * width]
    block_tables_SB = tables.view(num_slices, width)
    positions = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    slots = [
        block_tables_SB[s, position // block_size] * block_size + position % block_size
        for s, position in enumerate(positions)
    ]

    def to_device(values: torch.Tensor | list[int]) -> torch.Tensor:
        return torch.as_tensor(values).to(device=device, dtype=torch.int32)

    batch = Batch(
        positions_T=to_device(torch.cat(positions)),
        query_starts_S1=to_device([0, *itertools.accumulate(lengths)]),
        starts_S=to_device(list(starts)),
        lengths_S=to_device(list(lengths)),
        block_tables_SB=to_device(block_tables_SB),
        slot_mapping_T=to_device(torch.cat(slots)),
        num_decodes=sum(1 for _ in itertools.takewhile(lambda n: n == 1, lengths)),
        max_length=max(lengths),
        max_kv_length=max(ends),
    )
    return batch, num_blocks


def padded(batch: Batch, num_tokens: int, num_slices: int, max_kv_length: int) -> Batch:
    """The batch as a captured graph sees it: empty slices and slotless tokens at the end."""
    T, S = batch.positions_T.shape[0], batch.starts_S.shape[0]

    def extend(values: torch.Tensor, size: int, fill: int) -> torch.Tensor:
        tail = torch.full((size - values.shape[0], *values.shape[1:]), fill, dtype=torch.int32)
        return torch.cat((values, tail.to(values.device)))

    if num_tokens < T or num_slices < S:
        raise ValueError("a batch cannot be padded to less than it holds")
    hybrid = num_tokens > num_slices
    return Batch(
        positions_T=extend(batch.positions_T, num_tokens, 0),
        query_starts_S1=extend(batch.query_starts_S1, num_slices + 1, T),
        starts_S=extend(batch.starts_S, num_slices, 0),
        lengths_S=extend(batch.lengths_S, num_slices, 0),
        block_tables_SB=extend(batch.block_tables_SB, num_slices, 0),
        slot_mapping_T=extend(batch.slot_mapping_T, num_tokens, -1),
        num_decodes=num_slices,
        max_length=num_tokens if hybrid else 1,
        max_kv_length=max_kv_length,
        captured=True,
    )
