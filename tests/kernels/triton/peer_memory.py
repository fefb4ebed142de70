"""The memory of several ranks, as plain tensors of one device."""

from __future__ import annotations

import torch

from kernels.all_reduce import PeerMemory


def make_ranks(
    num_ranks: int, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> list[PeerMemory]:
    """Each rank's view of all; windows are filled with NaN."""
    windows = [
        torch.full((2, rows, width), torch.nan, dtype=dtype, device=device)
        for _ in range(num_ranks)
    ]
    counts = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(num_ranks)]
    addresses = [[x.data_ptr() for x in held] for held in (counts, windows)]
    table_2R = torch.tensor(addresses, device=device)
    return [
        PeerMemory(windows[r], counts[r], torch.zeros_like(counts[r]), table_2R)
        for r in range(num_ranks)
    ]


def arrive_at(peers: list[PeerMemory], rank: int, row: int, part_H: torch.Tensor) -> None:
    """What a rank's program of this row does before it waits."""
    mine = peers[rank]
    mine.calls_P[row] += 1
    mine.windows_2PH[mine.calls_P[row] % 2, row] = part_H
    for peer in peers:
        peer.counts_P[row] += 1


def arrive(peers: list[PeerMemory], rank: int, part_TH: torch.Tensor) -> None:
    for row, part_H in enumerate(part_TH):
        arrive_at(peers, rank, row, part_H)
