"""The sum over ranks with residual and norm in one launch, on one device: its other ranks' parts
are written, and counted, before a rank's kernel begins."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from app.bench.gpu.checks import BOUNDS, CheckResult, poisoned_outputs
from kernels.all_reduce import PeerMemory
from kernels.interface import Backend
from kernels.triton import reference


def make_ranks(
    num_ranks: int, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> list[PeerMemory]:
    """Each rank's view of the memory of all; windows are filled with NaN."""
    shape = (2, rows, width)
    windows = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(num_ranks)]
    counts = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(num_ranks)]
    addresses = [[x.data_ptr() for x in held] for held in (counts, windows)]
    table_2R = torch.tensor(addresses, device=device)
    return [
        PeerMemory(window_2PH, count_P, torch.zeros_like(count_P), table_2R)
        for window_2PH, count_P in zip(windows, counts, strict=True)
    ]


def arrive_at(peers: list[PeerMemory], rank: int, row: int, part_H: torch.Tensor) -> None:
    """What a rank's program of this row does before it waits."""
    mine = peers[rank]
    mine.calls_P[row] += 1
    mine.windows_2PH[mine.calls_P[row] % 2, row] = part_H
    for peer in peers:
        peer.counts_P[row] += 1


def reduce_as(
    rank: int, peers: list[PeerMemory], parts: list[torch.Tensor], residual_TH: torch.Tensor,
    weight_H: torch.Tensor, backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(norm, new residual) of one rank, when the others have arrived. eps is 1e-5."""
    for other, part_TH in enumerate(parts):
        if other != rank:
            for row, part_H in enumerate(part_TH):
                arrive_at(peers, other, row, part_H)
    total_TH = residual_TH.clone()
    with poisoned_outputs():
        out_TH = backend.reduce_add_rms_norm(parts[rank], total_TH, weight_H, 1e-5, peers[rank])
    assert out_TH is not None
    return out_TH, total_TH


def draw(
    num_ranks: int, tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Random (parts, residual, weight)."""
    shape = (num_ranks + 1, tokens, width)
    *parts, residual_TH = torch.randn(shape, device=device).to(dtype)
    return parts, residual_TH, torch.randn(width, device=device).to(dtype)


def check_reduce_norm(
    backend: Backend, dtype: torch.dtype, device: torch.device,
    num_ranks: int, tokens: int, width: int,
) -> Iterator[CheckResult]:  # fmt: skip
    """The first and the last rank, whose calls follow each other."""
    peers = make_ranks(num_ranks, tokens + 1, width, dtype, device)
    for rank in (0, num_ranks - 1, 0):
        parts, residual_TH, weight_H = draw(num_ranks, tokens, width, dtype, device)
        out_TH, total_TH = reduce_as(rank, peers, parts, residual_TH, weight_H, backend)
        sum_TH = torch.stack(parts).double().sum(0) + residual_TH.double()
        normed_TH = reference.rms_norm(total_TH, weight_H, 1e-5)
        name = f"{backend.name} reduce_norm, rank {rank} of {num_ranks}, {tokens}x{width}"
        pairs = {"residual": (total_TH, sum_TH), "norm": (out_TH, normed_TH)}
        for what, (out, expected) in pairs.items():
            error = reference.relative_error(out, expected)
            kind = str(dtype).removeprefix("torch.")
            yield CheckResult(f"{name}, {what}", kind, error, BOUNDS[dtype])
