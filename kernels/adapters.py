"""LoRA adapters of linear layers: stacked in slots, applied to runs of a batch's rows.

An adapter adds B A x to a linear layer's output for x. Every layer has the same slots, each of
which holds one adapter's A and B; the rows of a batch that use the same slot form one run (a
segment of Punica's SGMV, arXiv 2310.18547). Shape suffixes as in `kernels.interface`, besides C
slots, M parts of a layer, R rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

# Ranks are zero-padded to a multiple of this: kernels compute this many rows of A at once.
RANK_ALIGNMENT = 8


@dataclass(slots=True)
class AdapterModule:
    """The slots of one linear layer, whose output features are `widths` of parts side by side (q, k
    and v), each with an A of its own. Parts that a slot's adapter does not change are zero, with
    rank 0.

    b_CRO is multiplied by the adapter's scale. ranks_CM is int32 on the host, and device_ranks_CM
    has the same numbers beside the weights.
    """

    a_CMRK: torch.Tensor
    b_CRO: torch.Tensor
    ranks_CM: torch.Tensor
    device_ranks_CM: torch.Tensor
    widths: tuple[int, ...]

    def put(self, slot: int, part: int, first: int, a_RK: torch.Tensor, b_OR: torch.Tensor) -> None:
        """Fill the ranks from `first` on of one part of a slot, which no running step may use."""
        ranks = slice(first, first + len(a_RK))
        self.a_CMRK[slot, part, ranks] = a_RK
        self.b_CRO[slot, ranks, self._columns(part)] = b_OR.T

    def end(self, slot: int, part: int, rank: int) -> None:
        """The part, of which so many ranks are filled, has no more; 0: it changes nothing."""
        self.a_CMRK[slot, part, rank:] = 0
        self.b_CRO[slot, rank:, self._columns(part)] = 0
        self.ranks_CM[slot, part] = self.device_ranks_CM[slot, part] = rank

    def _columns(self, part: int) -> slice:
        begin = sum(self.widths[:part])
        return slice(begin, begin + self.widths[part])


def adapter_module(
    num_slots: int,
    max_rank: int,
    in_features: int,
    widths: tuple[int, ...],
    dtype: torch.dtype,
    zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
) -> AdapterModule:
    """A module of empty slots, in memory from `zeros`."""
    rank = -(-max_rank // RANK_ALIGNMENT) * RANK_ALIGNMENT
    a_CMRK = zeros((num_slots, len(widths), rank, in_features), dtype)
    ranks_CM = torch.zeros((num_slots, len(widths)), dtype=torch.int32)
    return AdapterModule(
        a_CMRK,
        zeros((num_slots, rank, sum(widths)), dtype),
        ranks_CM,
        ranks_CM.to(a_CMRK.device, copy=True),
        widths,
    )


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """Adapter slots of one decoder layer's linears, named as in `LayerWeights`, and of a mixer's
    beside attention; None where no adapter targets one."""

    qkv: AdapterModule | None = None
    out: AdapterModule | None = None
    gate_up: AdapterModule | None = None
    down: AdapterModule | None = None
    gates: AdapterModule | None = None
    beside_inputs: AdapterModule | None = None
    beside_out: AdapterModule | None = None


NO_ADAPTERS = LayerAdapters()


@dataclass(slots=True)
class AdapterRuns:
    """Which rows of a batch use which slots: rows_N[starts[i] : starts[i + 1]] use slots[i].

    rows_N is int32 on the stage's device, starts and slots int32 on the host. Rows without an
    adapter are in no run. tiles_B3: kept by a backend that cuts runs into tiles on the device
    (`tiles_of`); no part of what the runs are. captured: rows_N and tiles_B3 are buffers that every
    replay of a CUDA graph finds filled anew, with tiles without rows at the end; starts and slots
    are empty.
    """

    rows_N: torch.Tensor
    starts: NDArray[np.int32]
    slots: NDArray[np.int32]
    tiles_B3: torch.Tensor | None = field(default=None, repr=False, compare=False)
    captured: bool = False


# Rows, starts and slots of `AdapterRuns`.
HostRuns = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]


def runs_of(slots_S: NDArray[np.int32], lengths_S: NDArray[np.int32]) -> HostRuns | None:
    """Runs of slices with these slots (-1: none) and lengths; None where no slice has one.

    >>> rows, starts, slots = runs_of(np.int32([1, -1, 0, 1]), np.int32([1, 1, 2, 1]))
    >>> rows.tolist(), starts.tolist(), slots.tolist()
    ([2, 3, 0, 4], [0, 2, 4], [0, 1])
    """
    slots_T = np.repeat(slots_S, lengths_S)
    order_T = np.argsort(slots_T, kind="stable")
    rows_N = order_T[np.count_nonzero(slots_T < 0) :]
    if not len(rows_N):
        return None
    slots_N = slots_T[rows_N]
    begins = np.flatnonzero(np.diff(slots_N, prepend=-1))
    starts = np.append(begins, len(rows_N))
    return rows_N.astype(np.int32), starts.astype(np.int32), slots_N[begins].astype(np.int32)


def tiles_of(starts: NDArray[np.int32], slots: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    """(B, 3): for each tile of at most so many rows its slot, and where it begins and ends in
    `AdapterRuns.rows_N`.

    >>> tiles_of(np.int32([0, 3, 4]), np.int32([5, 2]), 2).tolist()
    [[5, 0, 2], [5, 2, 3], [2, 3, 4]]
    """
    runs = zip(slots.tolist(), pairwise(starts.tolist()), strict=True)
    tiles = [
        (slot, first, min(first + rows, end))
        for slot, (begin, end) in runs
        for first in range(begin, end, rows)
    ]
    return np.array(tiles, np.int32).reshape(-1, 3)


def most_tiles(num_rows: int, num_slots: int, rows: int) -> int:
    """Tiles that `tiles_of` makes at most of a batch of so many rows.

    >>> most_tiles(1, 8, 16), most_tiles(40, 3, 16), most_tiles(64, 1, 16)
    (1, 5, 4)
    """
    runs = min(num_rows, num_slots)
    return runs + (num_rows - runs) // rows


def add_adapters(
    module: AdapterModule, x_TK: torch.Tensor, y_TO: torch.Tensor, runs: AdapterRuns
) -> None:
    """y += B A x in place for the rows of all runs, in torch."""
    num_parts, rank = module.a_CMRK.shape[1:3]
    for slot, (begin, end) in zip(runs.slots.tolist(), pairwise(runs.starts.tolist()), strict=True):
        rows_N = runs.rows_N[begin:end].long()
        shrunk_NX = x_TK[rows_N] @ module.a_CMRK[slot].flatten(0, 1).T
        parts = shrunk_NX.view(-1, num_parts, rank).unbind(1)
        b_parts = torch.split(module.b_CRO[slot], list(module.widths), dim=1)
        added_NO = torch.cat([h_NR @ b_RO for h_NR, b_RO in zip(parts, b_parts, strict=True)], 1)
        y_TO.index_add_(0, rows_N, added_NO)
