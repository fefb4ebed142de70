"""Decode attention's work list: equal shares, complete, and launches that know no lengths."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")

from app.bench.gpu import checks
from app.bench.gpu.checks import AttentionCase
from kernels.triton import decode, work_list
from kernels.triton.backend import TritonBackend
from kernels.triton.tiles import decode_tile, num_programs, target_arch
from kernels.triton.work_list import plan_work

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
HEADS = (4, 2, 16)


def case(slices: tuple[tuple[int, int], ...], pad: tuple[int, int] | None = None) -> AttentionCase:
    return AttentionCase("work", HEADS, 16, slices, pad=pad)


@pytest.mark.parametrize("num_slices", [1, 7, 300])
def test_shares_are_equal_and_complete(num_slices: int) -> None:
    rng = np.random.default_rng(num_slices)
    lengths = rng.choice([1, 1, 1, 0, 5], num_slices)
    starts = rng.integers(0, 900, num_slices)
    work = case(((0, 1),))
    _, batch, _ = checks.attention_inputs(work, TritonBackend(), torch.float32, DEVICE)
    batch.starts_S = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    batch.lengths_S = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    listed = plan_work(batch, num_slices, work.shape, torch.float32)
    block = decode_tile(HEADS[2], 2, torch.float32, target_arch()).block_k
    tiles_S = np.where(lengths == 1, -(-(starts + 1) // block), 0)
    ends_S = np.cumsum(tiles_S)
    assert listed.tile_starts_S1.tolist() == [0, *ends_S]
    share = -(-ends_S[-1] * HEADS[1] // num_programs())
    firsts = np.arange(num_programs()) * share
    wanted = np.searchsorted(ends_S * HEADS[1], firsts, side="right")
    assert listed.first_slice_P.tolist() == wanted.tolist()


@pytest.mark.parametrize("programs", [1, 3, 50])
def test_any_number_of_programs_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, programs: int
) -> None:
    """Heads whole, in two parts, in more parts than one pass of the merge takes."""
    monkeypatch.setattr(work_list, "num_programs", lambda: programs)
    torch.manual_seed(0)
    slices = ((1200, 1), (0, 1), (70, 3), (129, 1))
    result = checks.check_attention(case(slices, (2, 2)), TritonBackend(), torch.float32, DEVICE)
    assert result.passed, result


def test_a_captured_launch_does_not_grow_with_the_longest_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Watched:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, **constants: Any) -> None:
                numbers = [a.numel() for a in arguments[4:6] if isinstance(a, torch.Tensor)]
                seen[-1].append((grid, *numbers, *sorted(constants.items())))
                self.kernel[grid](*arguments, **constants)

            return launch

    monkeypatch.setattr(decode, "_decode_kernel", Watched(decode._decode_kernel))
    seen: list[list[tuple[object, ...]]] = []
    for longest in (64, 131_072):
        seen.append([])
        backend = TritonBackend()
        decodes = case(((5, 1), (40, 1)), (1, 1))
        q, batch, cache = checks.attention_inputs(decodes, backend, torch.float32, DEVICE)
        batch.max_kv_length = longest
        backend.attention(q, batch, cache, decodes.shape)
    assert seen[0] == seen[1]
    assert seen[0][0][0] == (num_programs(),)
