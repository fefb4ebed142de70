"""A hybrid batch in one launch: bit for bit what two launches give, whatever the batch holds."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from app.bench.gpu import checks  # noqa: E402
from app.bench.gpu.checks import AttentionCase  # noqa: E402
from app.bench.gpu.hybrid_checks import check_one_launch, shares_launch  # noqa: E402
from kernels.interface import AttentionShape  # noqa: E402
from kernels.triton import hybrid, tiles, work_list  # noqa: E402
from kernels.triton.hybrid import fits, role_of  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALF = torch.bfloat16 if ON_GPU else torch.float16

HEADS = (4, 2, 64)
OF_ONE_KIND = (
    AttentionCase("decodes", HEADS, 16, ((5, 1), (90, 1))),
    AttentionCase("captured decodes", HEADS, 16, ((5, 1), (90, 1)), pad=(1, 1)),
    AttentionCase("chunks", HEADS, 16, ((5, 20), (0, 3))),
)
CASES = (
    *(case for case in checks.SMALL_CASES if shares_launch(case, HALF)),
    AttentionCase("captured, no chunk", HEADS, 16, ((5, 1), (90, 1), (31, 1)), pad=(40, 3)),
    AttentionCase("captured, no decode", HEADS, 16, ((5, 20), (0, 3)), pad=(40, 3)),
    AttentionCase("captured, nothing but a token", HEADS, 16, ((0, 1),), pad=(90, 5)),
    AttentionCase("captured, window", HEADS, 32, ((90, 1), (50, 30)), window=37, pad=(9, 3)),
    AttentionCase("captured, chunks", HEADS, 32, ((90, 1), (50, 30)), 37, pad=(9, 3), chunked=True),
    AttentionCase("captured, softcap", HEADS, 32, ((90, 1), (0, 30)), softcap=20.0, pad=(9, 3)),
    AttentionCase("captured, sinks", HEADS, 7, ((90, 1), (50, 30)), sinks=True, pad=(9, 3)),
    AttentionCase("captured, float8", HEADS, 16, ((90, 1), (50, 30)), float8=True, pad=(9, 3)),
    AttentionCase("more tiles than ranges", (2, 1, 32), 16, ((90, 1), (0, 300))),
)


class Counting:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return self.kernel[grid]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting(hybrid._hybrid_kernel)
    monkeypatch.setattr(hybrid, "_hybrid_kernel", counting)
    return counting


def compare(case: AttentionCase, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    result = check_one_launch(case, dtype, DEVICE)
    assert result.passed, result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_one_launch_equals_two(case: AttentionCase, counted: Counting) -> None:
    compare(case, HALF)
    assert counted.launches == 1


@pytest.mark.parametrize("case", OF_ONE_KIND, ids=lambda case: case.name.replace(" ", "-"))
def test_a_batch_of_one_kind_keeps_its_kernel(case: AttentionCase, counted: Counting) -> None:
    compare(case, HALF)
    assert counted.launches == 0


@pytest.mark.parametrize(("head_dim", "launches"), [(128, 1), (64, 0)])
def test_one_launch_equals_two_in_float32(counted: Counting, head_dim: int, launches: int) -> None:
    """Of heads of 64 numbers, tiles have more warps than decodes."""
    compare(AttentionCase("", (4, 2, head_dim), 16, ((90, 1), (50, 30))), torch.float32)
    assert counted.launches == launches


@pytest.mark.parametrize("programs", [1, 3, 50])
def test_any_number_of_ranges_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, counted: Counting, programs: int
) -> None:
    monkeypatch.setattr(work_list, "num_programs", lambda: programs)
    slices = ((300, 1), (0, 1), (70, 3), (129, 1), (0, 90))
    compare(AttentionCase("", (4, 2, 16), 16, slices, pad=(2, 2)), HALF)
    assert counted.launches == 1


@triton.jit
def _roles_kernel(
    is_range_ptr: tl.tensor,
    index_ptr: tl.tensor,
    NUM_RANGES: tl.constexpr,
    STRIPE: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    is_range, index = role_of(program, NUM_RANGES, STRIPE)
    tl.store(is_range_ptr + program, is_range.to(tl.int32))
    tl.store(index_ptr + program, index)


def roles(num_ranges: int, stripe: int, programs: int) -> list[tuple[int, int]]:
    is_range, index = (
        torch.full((programs,), -1, dtype=torch.int32, device=DEVICE) for _ in range(2)
    )
    _roles_kernel[(programs,)](is_range, index, NUM_RANGES=num_ranges, STRIPE=stripe)
    return list(zip(is_range.tolist(), index.tolist(), strict=True))


@pytest.mark.parametrize(
    ("num_ranges", "stripe", "programs"), [(8, 4, 30), (8, 4, 16), (5, 2, 11), (3, 8, 40)]
)
def test_every_range_and_tile_is_taken_once(num_ranges: int, stripe: int, programs: int) -> None:
    expected = [(1, i) for i in range(num_ranges)]
    expected += [(0, i) for i in range(programs - num_ranges)]
    assert sorted(roles(num_ranges, stripe, programs)) == sorted(expected)


@pytest.mark.parametrize("multiprocessors", [4, 6])
def test_each_multiprocessor_begins_with_both_kinds(multiprocessors: int) -> None:
    resident = 2 * multiprocessors
    kinds = [is_range for is_range, _ in roles(resident, multiprocessors, 2 * resident)]
    one_in_turn = [{kinds[i], kinds[multiprocessors + i]} for i in range(multiprocessors)]
    two_at_once = [{kinds[2 * i], kinds[2 * i + 1]} for i in range(multiprocessors)]
    assert one_in_turn == two_at_once == [{0, 1}] * multiprocessors


@pytest.mark.parametrize(("multiprocessors", "stripe"), [(132, 132), (13, 14)])
def test_a_stripe_is_even(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, stripe: int
) -> None:
    monkeypatch.setattr(tiles, "_num_multiprocessors", lambda: multiprocessors)
    assert tiles.stripe() == stripe


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "shares"),
    [
        (90, torch.bfloat16, 128, True),
        (90, torch.bfloat16, 256, True),
        (90, torch.float32, 64, False),
        (80, torch.bfloat16, 128, False),
        (100, torch.bfloat16, 128, False),
    ],
)
def test_programs_of_unlike_warps_share_no_launch(
    monkeypatch: pytest.MonkeyPatch, arch: int, dtype: torch.dtype, head_dim: int, shares: bool
) -> None:
    monkeypatch.setattr("kernels.triton.prefill.target_arch", lambda: arch)
    assert fits(AttentionShape(32, 8, head_dim, 1.0), dtype) is shares
