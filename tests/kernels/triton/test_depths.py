"""Of a long row only what lies around the threshold is collected."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"

from kernels.sampling import SamplingRows  # noqa: E402
from kernels.triton import depths, sampling  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
VOCABULARY, CHUNK = 1000, 256


def collected(top_k: int, top_p: float, logits_RV: torch.Tensor) -> list[tuple[float, int]]:
    """Logits and ids that are collected of a row."""
    rows = SamplingRows(
        *(np.array([value], np.float32) for value in (1.0, top_k, top_p, 0.0)),
        np.zeros(1, np.int64), np.zeros(1, np.int64),
    )  # fmt: skip
    highest = torch.zeros(1, 4, 2)
    ids = highest.view(torch.int32)
    for chunk, values in enumerate(logits_RV[0].split(CHUNK)):
        highest[0, chunk, 0] = values.max()
        ids[0, chunk, 1] = chunk * CHUNK + int(values.argmax())
    parameters = torch.from_numpy(sampling.pack_rows(rows)).view(torch.float32)
    most = VOCABULARY
    _, found = depths.collect(logits_RV.to(DEVICE), parameters.to(DEVICE), highest.to(DEVICE), most)
    found = found.cpu()
    pairs = zip(found[0, :, 0].tolist(), found.view(torch.int32)[0, :, 1].tolist(), strict=True)
    logits = logits_RV[0].tolist()
    # Behind those that were collected stands what memory held before.
    return [(x, i) for x, i in pairs if 0 <= i < VOCABULARY and x and logits[i] == x]


@pytest.mark.parametrize(("top_k", "top_p"), [(50, 1.0), (0, 0.9), (400, 0.5)])
def test_the_interval_holds_the_threshold_and_little_else(
    monkeypatch: pytest.MonkeyPatch, top_k: int, top_p: float
) -> None:
    monkeypatch.setattr(depths, "_CHUNK", CHUNK)
    logits = 3 * torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(5))
    found = collected(top_k, top_p, logits)
    sorted_V = logits[0].sort(descending=True).values
    wanted = []
    if top_k:
        wanted.append(float(sorted_V[top_k - 1]))
    if top_p < 1:
        p_V = torch.softmax(sorted_V[: top_k or None].double(), 0)
        wanted.append(float(sorted_V[int((p_V.cumsum(0) - p_V < top_p).sum()) - 1]))
    values, ids = zip(*found, strict=True)
    assert set(wanted) <= set(values)
    assert list(ids) == sorted(ids)
    between = sum(min(wanted) <= x <= max(wanted) for x in logits[0].tolist())
    assert len(found) <= between + 60
