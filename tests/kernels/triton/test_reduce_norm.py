"""The sum over ranks with residual and norm, against float64 and against separate operations."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"

from triton.runtime import interpreter  # noqa: E402

from app.bench.gpu.reduce_checks import (  # noqa: E402
    arrive_at,
    check_reduce_norm,
    draw,
    make_ranks,
    reduce_as,
)
from kernels.triton import reference  # noqa: E402
from kernels.triton.backend import TritonBackend  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALF = torch.bfloat16 if ON_GPU else torch.float16
BACKEND = TritonBackend()
EPS = 1e-5


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("size", [(1, 64), (3, 1000), (5, 33), (2, 4096)], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_sum_residual_and_norm(num_ranks: int, size: tuple[int, int], dtype: torch.dtype) -> None:
    results = list(check_reduce_norm(BACKEND, dtype, DEVICE, num_ranks, *size))
    assert len(results) == 6
    for result in results:
        assert result.passed, result


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bits_are_those_of_separate_operations(num_ranks: int) -> None:
    """A float32 sum in the order of ranks, rounded as one rank's product is, then added."""
    peers = make_ranks(num_ranks, 4, 1000, HALF, DEVICE)
    parts, residual_TH, weight_H = draw(num_ranks, 4, 1000, HALF, DEVICE)
    out_TH, total_TH = reduce_as(1, peers, parts, residual_TH, weight_H, BACKEND)
    sum_TH = torch.zeros(4, 1000, device=DEVICE)
    for part_TH in parts:
        sum_TH += part_TH
    separate_TH = BACKEND.add_rms_norm(sum_TH.to(HALF), residual_TH, weight_H, EPS)
    assert torch.equal(total_TH, residual_TH)
    assert torch.equal(out_TH, separate_TH)


def test_bits_depend_neither_on_rank_nor_on_batch() -> None:
    parts, residual_TH, weight_H = draw(4, 5, 1000, HALF, DEVICE)
    peers = make_ranks(4, 8, 1000, HALF, DEVICE)
    first = reduce_as(0, peers, parts, residual_TH, weight_H, BACKEND)
    for rank in range(4):
        peers = make_ranks(4, 8, 1000, HALF, DEVICE)
        again = reduce_as(rank, peers, parts, residual_TH, weight_H, BACKEND)
        rows = [part_TH[3:4] for part_TH in parts]
        alone = reduce_as(rank, peers, rows, residual_TH[3:4], weight_H, BACKEND)
        for all_TH, same_TH, one_TH in zip(first, again, alone, strict=True):
            assert torch.equal(all_TH, same_TH)
            assert torch.equal(all_TH[3:4], one_TH)


@pytest.mark.skipif(ON_GPU, reason="what the interpreter does is observed")
def test_a_row_is_read_when_all_have_written_and_written_when_all_have_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peers arrive as late as the protocol allows: one each time that the kernel looks. Until one
    has begun a call, it may still read what this rank wrote for the call before."""
    num_ranks, width = 3, 33
    peers = make_ranks(num_ranks, 4, width, torch.float32, DEVICE)
    mine = peers[0]
    waiting: list[tuple[int, int, torch.Tensor]] = []  # rank, row, its part
    read_by_peers: dict[int, torch.Tensor] = {}  # this rank's rows of the call before
    looks = 0
    atomic_rmw = interpreter.InterpreterBuilder.create_atomic_rmw

    def watched(builder: Any, operation: Any, pointer: Any, value: Any, *rest: Any) -> Any:
        nonlocal looks
        row, looking = int(builder.grid_idx[0]), np.all(value.data == 0)
        if not looking:
            place = mine.windows_2PH[(mine.calls_P[row] + 1) % 2, row]
            assert torch.equal(place, parts[0][row]), "it tells others before it has written"
        elif row in read_by_peers:
            place = mine.windows_2PH[mine.calls_P[row] % 2, row]
            assert torch.equal(place, read_by_peers[row]), "it writes what others still read"
        found = atomic_rmw(builder, operation, pointer, value, *rest)
        if looking:
            looks += 1
            absent = [one for one in waiting if one[1] == row]
            if absent:
                waiting.remove(absent[0])
                arrive_at(peers, *absent[0])
        return found

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_atomic_rmw", watched)
    for tokens in (3, 1, 4, 2, 2, 3):
        parts, residual_TH, weight_H = draw(num_ranks, tokens, width, torch.float32, DEVICE)
        waiting += [(r, t, parts[r][t]) for r in range(1, num_ranks) for t in range(tokens)]
        before = looks
        expected_TH = residual_TH.double() + sum(part_TH.double() for part_TH in parts)
        BACKEND.reduce_add_rms_norm(parts[0], residual_TH, weight_H, EPS, mine)
        assert reference.relative_error(residual_TH, expected_TH) <= 1e-6
        assert looks - before == tokens * num_ranks
        assert not waiting
        read_by_peers.update({t: parts[0][t].clone() for t in range(tokens)})
    calls = torch.tensor([6, 5, 3, 1])
    assert torch.equal(mine.calls_P, calls)
    assert all(torch.equal(peer.counts_P, calls * num_ranks) for peer in peers)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5, 64), torch.float32), ((0, 64), torch.float32), ((2, 32), torch.float32), ((2, 64), HALF)],
    ids=str,
)
def test_what_does_not_fit_is_left_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    [mine, _] = make_ranks(2, 4, 64, torch.float32, DEVICE)
    x_TH = torch.ones(shape, dtype=dtype, device=DEVICE)
    residual_TH, weight_H = x_TH.clone(), x_TH.new_ones(shape[1])
    assert BACKEND.reduce_add_rms_norm(x_TH, residual_TH, weight_H, EPS, mine) is None
    assert torch.equal(x_TH, residual_TH)
    assert not mine.counts_P.any()
    columns = torch.ones(64, 4, device=DEVICE).T
    assert BACKEND.reduce_add_rms_norm(columns, columns.clone(), columns[0], EPS, mine) is None
