"""LoRA adapters against their float64 reference: the cases of the tests and of the bench."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from app.bench.gpu.checks import BOUNDS, CheckResult
from kernels.adapters import AdapterModule, AdapterRuns, adapter_module, runs_of
from kernels.interface import Backend
from kernels.triton import reference


@dataclass(frozen=True, slots=True)
class AdapterCase:
    """One layer and one batch.

    slots: of each row, -1 for no adapter. ranks: of the adapter in each slot, 0 for an empty one.
    """

    name: str
    slots: tuple[int, ...]
    ranks: tuple[int, ...]
    max_rank: int
    in_features: int
    widths: tuple[int, ...]


_RANKS = (8, 0, 16, 24)
ALTERNATING = (2, -1, 0, 3, 3, 1, -1, 2)
SMALL_ADAPTERS = (
    AdapterCase("one row", (0,), _RANKS, 24, 64, (128,)),
    AdapterCase("one row without an adapter", (-1,), _RANKS, 24, 64, (128,)),
    AdapterCase("an empty slot", (1, 1), _RANKS, 24, 64, (128,)),
    AdapterCase("a tile and a row", (2,) * 17, _RANKS, 24, 64, (72,)),
    AdapterCase("40 rows of all slots", ALTERNATING * 5, _RANKS, 24, 96, (40, 24, 24)),
    AdapterCase("two parts", ALTERNATING * 4, _RANKS, 32, 48, (80, 80)),
    AdapterCase("odd widths", ALTERNATING * 3, _RANKS, 40, 37, (131, 3, 5)),
    AdapterCase("odd pieces", ALTERNATING, _RANKS, 24, 2 * 2048 + 3, (19,)),
    AdapterCase("a wide last part", ALTERNATING, _RANKS, 24, 33, (1, 2, 300)),
    AdapterCase("rank 8 of 8", (0, -1, 0), (8,), 8, 64, (48,)),
    AdapterCase("rank 3 of 5", (0, -1, 0), (3,), 5, 64, (48,)),
)
FULL_ADAPTERS = (
    AdapterCase("qkv, 40 rows", ALTERNATING * 5, (8, 16, 32, 64), 64, 4096, (4096, 1024, 1024)),
    AdapterCase("down, 2048 rows", (1,) * 2048, (8, 16), 16, 14_336, (4096,)),
)


def adapter_inputs(
    case: AdapterCase, dtype: torch.dtype, device: torch.device
) -> tuple[AdapterModule, torch.Tensor, torch.Tensor, AdapterRuns]:
    """Filled slots, and random x (T, K) and y (T, O)."""

    def zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device).to(dtype)

    module = adapter_module(
        len(case.ranks), case.max_rank, case.in_features, case.widths, dtype, zeros
    )
    for slot, rank in enumerate(case.ranks):
        for part, width in enumerate(case.widths if rank else ()):
            a_RK = randn(rank, case.in_features) / math.sqrt(case.in_features)
            module.put(slot, part, 0, a_RK, randn(width, rank) / math.sqrt(rank))
            module.end(slot, part, rank)
    nothing = np.zeros(0, np.int32)
    found = runs_of(np.array(case.slots, np.int32), np.ones(len(case.slots), np.int32))
    rows_N, starts, slots = found or (nothing, np.zeros(1, np.int32), nothing)
    runs = AdapterRuns(torch.from_numpy(rows_N).to(device), starts, slots)
    num_rows = len(case.slots)
    return module, randn(num_rows, case.in_features), randn(num_rows, sum(case.widths)), runs


def check_adapters(
    case: AdapterCase, backend: Backend, dtype: torch.dtype, device: torch.device
) -> CheckResult:
    """What is added, row by row; rows without an adapter must keep their bits."""
    module, x_TK, y_TO, runs = adapter_inputs(case, dtype, device)
    before_TO = y_TO.clone()
    backend.add_adapters(module, x_TK, y_TO, runs)
    expected_TO = reference.adapters(module, x_TK, before_TO, case.slots)
    error = reference.relative_error(y_TO, expected_TO)
    kept_T = torch.tensor([slot < 0 or not case.ranks[slot] for slot in case.slots], device=device)
    if not torch.equal(y_TO[kept_T], before_TO[kept_T]):
        error = math.inf
    name = f"{backend.name} adapters: {case.name}"
    return CheckResult(name, str(dtype).removeprefix("torch."), error, BOUNDS[dtype])
