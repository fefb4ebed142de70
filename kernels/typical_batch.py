"""The paper's typical iteration, a prefill chunk beside decodes, to time attention with."""

from __future__ import annotations

import torch

from kernels.interface import Batch

MOST_BYTES = 1 << 29  # of KV that a measurement takes, all layers together


def decodes_within(wanted: int, context: int, block_size: int, block_bytes: int) -> int:
    """How many of the decodes wanted fit `MOST_BYTES` in one layer, at least one."""
    context_bytes = -(-(context + 1) // block_size) * block_bytes
    return max(1, min(wanted, MOST_BYTES // context_bytes))


def layers_within(wanted: int, num_blocks: int, block_bytes: int) -> int:
    """How many of the layers wanted fit `MOST_BYTES`, at least one. They are used in turn: a single
    small one would stay in the L2 cache."""
    return max(1, min(wanted, MOST_BYTES // (num_blocks * block_bytes)))


def typical_batch(
    num_decodes: int, context: int, chunk: int, block_size: int, device: torch.device
) -> tuple[Batch, int]:
    """Decodes behind `context` tokens each and the first `chunk` tokens of a prompt, all with
    blocks of their own in random order; and how many blocks the cache needs."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    num_tokens = num_decodes + chunk
    of_decode, of_chunk = -(-(context + 1) // block_size), -(-chunk // block_size)
    blocks = torch.randperm(num_decodes * of_decode + of_chunk)
    tables = torch.zeros(num_decodes + 1, max(of_decode, of_chunk), dtype=torch.int64)
    tables[:num_decodes, :of_decode] = blocks[of_chunk:].view(num_decodes, of_decode)
    tables[num_decodes, :of_chunk] = blocks[:of_chunk]
    batch = Batch(
        positions_T=ints([0] * num_tokens),
        query_starts_S1=ints([*range(num_decodes + 1), num_tokens]),
        starts_S=ints([context] * num_decodes + [0]),
        lengths_S=ints([1] * num_decodes + [chunk]),
        block_tables_SB=tables.to(device=device, dtype=torch.int32),
        slot_mapping_T=ints([0] * num_tokens),
        num_decodes=num_decodes,
        max_length=chunk,
        max_kv_length=max(context + 1, chunk),
    )
    return batch, blocks.numel()
