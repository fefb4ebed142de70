"""The list of prefill tiles against a loop in Python."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")

from app.bench.gpu.geometry import hybrid_batch, padded
from kernels.triton.prefill_tiles import list_tiles

DEVICE = torch.device("cuda" if os.environ.get("TRITON_INTERPRET") != "1" else "cpu")


def expected(lengths: list[int], first: int, slots: int, tokens: int) -> list[int]:
    return [
        s
        for s, length in enumerate(lengths)
        if s >= first and not (length == 1 and s < slots)
        for _ in range(-(-length // tokens))
    ]


@pytest.mark.parametrize("tokens", [4, 32])
@pytest.mark.parametrize(
    "lengths", [[1, 1, 20, 70, 1], [9], [1] * 140 + [33], [300] + [1] * 3, [2] * 200]
)
@pytest.mark.parametrize("captured", [False, True])
def test_every_tile_has_its_slice(lengths: list[int], tokens: int, captured: bool) -> None:
    batch, _ = hybrid_batch([0] * len(lengths), lengths, 16, DEVICE)
    first = slots = batch.num_decodes
    if captured:
        batch = padded(batch, sum(lengths) + 9, len(lengths) + 5, 400)
        first, slots = 0, batch.num_decodes
    num_tokens = batch.positions_T.shape[0]
    tiles = list_tiles(batch, num_tokens, first, slots, tokens)
    wanted = expected(batch.lengths_S.tolist(), first, slots, tokens)
    count = int(tiles.tile_starts_S1[-1])
    assert tiles.slices_X[:count].tolist() == wanted
    assert count == len(wanted) <= tiles.most
    for s in set(wanted):
        assert int(tiles.tile_starts_S1[s]) == wanted.index(s)
