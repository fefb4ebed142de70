"""Thresholds found among what few chunks collect are those of a sorted row."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"

from kernels.sampling import SamplingRows  # noqa: E402
from kernels.torch import sampling as reference  # noqa: E402
from kernels.triton import depths, sampling, threshold  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
VOCABULARY = 600
# top_k, top_p, min_p
LIMITS = (
    (0, 0.9, 0.0), (0, 0.999, 0.0), (0, 0.0, 0.0), (40, 1.0, 0.0), (1, 1.0, 0.0), (300, 0.7, 0.0),
    (5, 0.999, 0.2), (0, 0.3, 0.1),
)  # fmt: skip


def drawn(logits: torch.Tensor, limits: tuple[tuple[int, float, float], ...]) -> list[int]:
    top_k, top_p, min_p = zip(*limits, strict=True)
    count = len(limits)
    rows = SamplingRows(
        temperature_S=np.ones(count, np.float32),
        top_k_S=np.array(top_k, np.int32),
        top_p_S=np.array(top_p, np.float32),
        min_p_S=np.array(min_p, np.float32),
        seed_S=np.arange(count),
        position_S=np.arange(count),
    )
    tokens = sampling.sample(logits.to(DEVICE), rows).tolist()
    assert tokens == reference.sample(logits, rows).tolist()
    return tokens


@pytest.mark.parametrize(
    ("spread", "most"),
    [(4.0, 512), (0.05, 512), (0.05, 16)],
    ids=["peaked", "almost flat", "more in the interval than are collected"],
)
def test_rows_in_many_chunks(monkeypatch: pytest.MonkeyPatch, spread: float, most: int) -> None:
    monkeypatch.setattr(depths, "_CHUNK", 128)
    monkeypatch.setattr(threshold, "MOST_COLLECTED", most)
    logits = torch.randn(
        len(LIMITS), VOCABULARY, generator=torch.Generator().manual_seed(int(10 * spread))
    )
    assert len(set(drawn(spread * logits, LIMITS))) > 2


def test_ties_over_chunks_go_to_the_lowest_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depths, "_CHUNK", 128)
    row = torch.zeros(VOCABULARY)
    row[200:] = 1.0
    drawn(row.repeat(len(LIMITS), 1), LIMITS)


@pytest.mark.parametrize("base", [2e5, -2e5, 3e6])
def test_logits_too_large_for_bins_are_searched_whole(base: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(len(LIMITS), VOCABULARY, generator=generator) + base
    assert len(set(drawn(logits, LIMITS))) > 2
