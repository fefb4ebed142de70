"""Adapters in two launches: against float64, alone as in any batch, and without waiting for the
device."""

from __future__ import annotations

import doctest
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")

from app.bench.gpu.adapter_checks import (
    ALTERNATING,
    SMALL_ADAPTERS,
    AdapterCase,
    adapter_inputs,
    check_adapters,
)
from app.bench.gpu.checks import BOUNDS
from kernels import adapters as layout
from kernels.adapters import AdapterModule, AdapterRuns, most_tiles, runs_of, tiles_of
from kernels.torch.backend import TorchBackend
from kernels.triton import adapters
from kernels.triton.backend import TritonBackend
from kernels.triton.reference import relative_error
from kernels.triton.tiles import adapter_tile
from tests.kernels.triton.interpreted import multiply_by_rows
from tests.kernels.triton.waits import Waited, refusing_waits

# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter's matrix product is wrong in bfloat16.
HALF = torch.bfloat16 if ON_GPU else torch.float16
BACKEND = TritonBackend()
RANKS = (8, 0, 16, 24)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("case", SMALL_ADAPTERS, ids=lambda case: case.name.replace(" ", "-"))
def test_against_float64(case: AdapterCase, dtype: torch.dtype) -> None:
    result = check_adapters(case, BACKEND, dtype, DEVICE)
    assert result.passed, result


def test_parts_of_rank_0_add_nothing() -> None:
    case = AdapterCase("", (0, 0, 1), (8, 16), 16, 64, (40, 24, 24))
    module, x, y, runs = adapter_inputs(case, torch.float32, DEVICE)
    module.end(0, 1, 0)
    before = y.clone()
    BACKEND.add_adapters(module, x, y, runs)
    changed = (y != before).unflatten(1, (11, 8)).any(2)
    assert changed.tolist() == [[True] * 5 + [False] * 3 + [True] * 3] * 2 + [[True] * 11]


def test_every_dtype_is_what_torch_computes() -> None:
    dtypes = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])
    for dtype in dtypes:
        case = AdapterCase("", ALTERNATING, RANKS, 24, 100, (70, 30))
        module, x, y, runs = adapter_inputs(case, dtype, DEVICE)
        expected = y.clone()
        TorchBackend().add_adapters(module, x, expected, runs)
        BACKEND.add_adapters(module, x, y, runs)
        assert relative_error(y, expected) <= BOUNDS[dtype]


def runs_for(slots: list[int]) -> AdapterRuns:
    found = runs_of(np.int32(slots), np.ones(len(slots), np.int32))
    assert found is not None
    return AdapterRuns(torch.from_numpy(found[0]).to(DEVICE), *found[1:])


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_a_row_has_the_same_bits_alone_and_in_company(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_by_rows(monkeypatch)
    small = replace(adapter_tile(dtype), piece_k=64, block_k=32)
    monkeypatch.setattr(adapters, "adapter_tile", lambda dtype: small)
    slots = [*ALTERNATING, *(0,) * 16]  # two tiles of slot 0
    case = AdapterCase("", tuple(slots), RANKS, 24, 64 + 20, (40, 24))
    module, x, y, runs = adapter_inputs(case, dtype, DEVICE)
    together = y.clone()
    BACKEND.add_adapters(module, x, together, runs)
    for t in (0, 2, 3, 23):  # of ranks 16, 8 and 24: alone, fewer rows of A are read
        alone = y[t : t + 1].clone()
        BACKEND.add_adapters(module, x[t : t + 1], alone, runs_for([slots[t]]))
        assert torch.equal(alone[0], together[t])
    order = torch.randperm(len(slots), device=DEVICE)
    shuffled = y[order].clone()
    BACKEND.add_adapters(module, x[order], shuffled, runs_for([slots[t] for t in order.tolist()]))
    assert torch.equal(shuffled, together[order])
    x[1:] = torch.inf  # other neighbors, of no number
    again = y.clone()
    BACKEND.add_adapters(module, x, again, runs)
    assert torch.equal(again[0], together[0])


class _Launches:
    """A kernel that counts instead of running."""

    def __init__(self) -> None:
        self.number = 0

    def __getitem__(self, grid: tuple[int, ...]) -> _Launches:
        return self

    def __call__(self, *args: Any, **options: Any) -> None:
        self.number += 1


@pytest.mark.parametrize(
    ("slots", "launches"),
    [((0,), 2), (ALTERNATING * 5, 2), ((0, 2, 3) * 30, 2), ((1, 1), 0)],
)
def test_two_launches_whatever_the_routing(
    slots: tuple[int, ...], launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None where no slot of the batch has an adapter for the layer."""
    counter = _Launches()
    monkeypatch.setattr(adapters, "_shrink_kernel", counter)
    monkeypatch.setattr(adapters, "_expand_kernel", counter)
    case = AdapterCase("", slots, RANKS, 24, 64, (40, 24, 24))
    module, x, y, runs = adapter_inputs(case, torch.float32, DEVICE)
    BACKEND.add_adapters(module, x, y, runs)
    assert counter.number == launches


def test_one_map_of_tiles_serves_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AdapterCase("", ALTERNATING, RANKS, 24, 64, (40, 24, 24))
    module, x, y, runs = adapter_inputs(case, torch.float32, DEVICE)
    BACKEND.add_adapters(module, x, y, runs)
    monkeypatch.delattr(adapters, "upload")
    BACKEND.add_adapters(module, x, y, runs)


def test_tiles_are_of_one_slot() -> None:
    result = doctest.testmod(layout)
    assert result.attempted == 4
    assert not result.failed
    rows = adapter_tile(torch.float32).rows
    starts, slots = np.int32([0, 1, 2 * rows, 5 * rows]), np.int32([3, 0, 1])
    tiles = tiles_of(starts, slots, rows)
    assert (tiles[:, 2] - tiles[:, 1] <= rows).all()
    covered = [(slot, n) for slot, begin, end in tiles.tolist() for n in range(begin, end)]
    assert covered == [
        (slot, n)
        for slot, begin, end in zip(slots.tolist(), starts[:-1], starts[1:], strict=True)
        for n in range(begin, end)
    ]


def adapted_without_waiting(
    module: AdapterModule, x: torch.Tensor, y: torch.Tensor, runs: AdapterRuns
) -> torch.Tensor:
    with refusing_waits(module.ranks_CM):
        BACKEND.add_adapters(module, x, y, runs)
    return y


def test_nothing_waits_for_the_device() -> None:
    case = AdapterCase("", ALTERNATING, RANKS, 24, 64, (40, 24, 24))
    module, x, y, runs = adapter_inputs(case, torch.float32, DEVICE)
    expected = y.clone()
    BACKEND.add_adapters(module, x, expected, runs)
    runs.tiles_B3 = None
    assert torch.equal(adapted_without_waiting(module, x, y, runs), expected)


@pytest.mark.parametrize("slots", [(0,), (2,) * 17, ALTERNATING, ALTERNATING * 5, (0, 2, 3) * 17])
def test_a_captured_launch_serves_any_batch(slots: tuple[int, ...]) -> None:
    """It has as many tiles as any batch and all ranks; the bits are those of the batch's own."""
    case = AdapterCase("", slots, RANKS, 24, 64, (40, 24, 24))
    module, x, y, runs = adapter_inputs(case, torch.float32, DEVICE)
    expected = y.clone()
    BACKEND.add_adapters(module, x, expected, runs)
    rows = adapter_tile(x.dtype).rows
    tiles = tiles_of(runs.starts, runs.slots, rows)
    most = most_tiles(len(slots), len(RANKS), rows)
    assert len(tiles) <= most
    tiles_B3 = torch.zeros((most, 3), dtype=torch.int32, device=DEVICE)
    tiles_B3[: len(tiles)] = torch.from_numpy(tiles)
    rows_T = torch.zeros(len(slots), dtype=torch.int32, device=DEVICE)
    rows_T[: len(runs.rows_N)] = runs.rows_N
    nothing = np.zeros(0, np.int32)
    static = AdapterRuns(rows_T, nothing, nothing, tiles_B3, captured=True)
    with refusing_waits():
        BACKEND.add_adapters(module, x, y, static)
    assert torch.equal(y, expected)


def test_no_batch_has_more_tiles() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        num_rows, num_slots, rows = rng.integers(1, 60), rng.integers(1, 9), rng.integers(1, 20)
        found = runs_of(
            rng.integers(num_slots, size=num_rows, dtype=np.int32), np.ones(num_rows, np.int32)
        )
        assert found is not None
        tiles = tiles_of(found[1], found[2], int(rows))
        assert len(tiles) <= most_tiles(int(num_rows), int(num_slots), int(rows))


@pytest.mark.parametrize("wait", [torch.max, torch.nonzero], ids=["item", "nonzero"])
def test_a_wait_would_be_seen(wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = AdapterCase("", ALTERNATING, RANKS, 24, 64, (40, 24, 24))
    module, x, y, runs = adapter_inputs(case, torch.float32, DEVICE)
    rows_N = runs.rows_N
    monkeypatch.setattr(adapters, "tiles_of", lambda *a: (int(wait(rows_N).max()), tiles_of(*a))[1])
    with pytest.raises(Waited):
        adapted_without_waiting(module, x, y, runs)


def test_preparing_compiles_what_a_batch_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On slots that are still empty, and without changing them."""
    case = AdapterCase("", (0,), (0, 0), 24, 64, (40, 24, 24))
    module, *_ = adapter_inputs(case, torch.float32, DEVICE)
    BACKEND.prepare_adapters(module)
    assert not module.a_CMRK.any()
    assert not module.b_CRO.any()
    counter = _Launches()
    monkeypatch.setattr(adapters, "_shrink_kernel", counter)
    monkeypatch.setattr(adapters, "_expand_kernel", counter)
    BACKEND.prepare_adapters(module)
    assert counter.number == 2


def test_what_does_not_fit_is_refused() -> None:
    case = AdapterCase("", (0, 2), RANKS, 24, 64, (40, 24))
    module, x, y, runs = adapter_inputs(case, torch.float32, DEVICE)
    with pytest.raises(ValueError, match=r"\(2, 32\) torch.float32: not 64"):
        BACKEND.add_adapters(module, x[:, :32], y, runs)
    with pytest.raises(ValueError, match=r"torch.float16: not 64 torch.float32"):
        BACKEND.add_adapters(module, x.half(), y, runs)
    with pytest.raises(ValueError, match=r"\(1, 64\) torch.float32: not 64"):
        BACKEND.add_adapters(module, x, y[:1], runs)
    with pytest.raises(ValueError, match="y_TO must be contiguous"):
        BACKEND.add_adapters(module, x, y.T.contiguous().T, runs)
    with pytest.raises(ValueError, match=r"adapter slots \[0, 4\] of 4"):
        BACKEND.add_adapters(module, x, y, runs_for([0, 4]))
    module.widths = (16, 16, 16, 16)
    with pytest.raises(ValueError, match="parts of"):
        BACKEND.add_adapters(module, x, y, runs)
