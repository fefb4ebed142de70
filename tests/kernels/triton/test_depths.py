"""Of a long row only what lies around the threshold is searched."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"

from app.bench.gpu.checks import poisoned_outputs  # noqa: E402
from kernels.sampling import SamplingRows  # noqa: E402
from kernels.triton import depths, sampling  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
VOCABULARY, CHUNK = 1000, 256
LIMITS = [(50, 1.0), (0, 0.9), (400, 0.5), (0, 0.999), (7, 0.2), (0, 0.0)]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depths, "_CHUNK", CHUNK)


def intervals(logits_V: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, ...]:
    """`depths.intervals` of one row, on the host."""
    rows = SamplingRows(
        *(np.array([value], np.float32) for value in (1.0, top_k, top_p, 0.0)),
        np.zeros(1, np.int64), np.zeros(1, np.int64),
    )  # fmt: skip
    parameters = torch.from_numpy(sampling.pack_rows(rows)).view(torch.float32)
    with poisoned_outputs():
        found = depths.intervals(logits_V[None].to(DEVICE), parameters.to(DEVICE))
    return tuple(part[0].cpu() for part in found)


def rows() -> dict[str, torch.Tensor]:
    def normal(spread: float) -> torch.Tensor:
        return spread * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5))

    sure, masked, low = normal(3), normal(3), normal(3)
    sure[700] = 40.0
    masked[: VOCABULARY - 60] = -torch.inf
    low[:CHUNK] -= 25  # a chunk whose bins lie partly below those of the row
    return {"peaked": normal(3), "flat": normal(0.05), "sure": sure, "masked": masked, "low": low}


def thresholds(logits_V: torch.Tensor, top_k: int, top_p: float) -> list[float]:
    sorted_V = logits_V.sort(descending=True).values
    wanted = []
    if top_k:
        wanted.append(float(sorted_V[top_k - 1]))
    if top_p < 1:
        p_V = torch.softmax(sorted_V[: top_k or None].double(), 0)
        num_kept = int((p_V.cumsum(0) - p_V < top_p * p_V.sum()).sum())
        wanted.append(float(sorted_V[max(num_kept, 1) - 1]))
    return [x for x in wanted if x > -torch.inf]


@pytest.mark.parametrize(("top_k", "top_p"), LIMITS)
@pytest.mark.parametrize("name", rows())
def test_the_interval_holds_the_thresholds_and_little_else(
    name: str, top_k: int, top_p: float
) -> None:
    logits_V = rows()[name]
    row_8, places_C3 = intervals(logits_V, top_k, top_p)
    highest, _, begin, end, num, above, total, _ = row_8.tolist()
    bin_V = (np.round(highest * 8) - (logits_V * 8).round()).clamp(0, depths.NUM_BINS.value - 1)
    finite_V = logits_V > -torch.inf
    assert highest == logits_V.max()
    assert int(row_8.view(torch.int32)[1]) == logits_V.argmax()
    assert total == pytest.approx(float((logits_V - highest).exp().sum()), rel=1e-5)
    inside_V = finite_V & (bin_V >= begin) & (bin_V <= end)
    assert num == inside_V.sum()
    assert above == (finite_V & (bin_V < begin)).sum()
    here = [int(part.sum()) for part in inside_V.split(CHUNK)]
    above_C = [int(part.sum()) for part in (finite_V & (bin_V < begin)).split(CHUNK)]
    assert places_C3.tolist() == [[sum(here[:c]), here[c], above_C[c]] for c in range(len(above_C))]
    wanted = thresholds(logits_V, top_k, top_p)
    bins = bin_V[torch.isin(logits_V, torch.tensor(wanted))]
    assert begin <= bins.min()
    assert bins.max() <= end
    if name != "masked" or not top_k:  # where fewer are left than top_k, all of them
        assert end - begin <= bins.max() - bins.min() + 6


def test_rows_without_limits_have_no_interval() -> None:
    row_8, _ = intervals(rows()["peaked"], VOCABULARY, 1.0)
    assert row_8[2:4].tolist() == [depths.NUM_BINS.value, -1]
    row_8, _ = intervals(torch.full((VOCABULARY,), -torch.inf), 50, 0.9)
    assert row_8[2:4].tolist() == [depths.NUM_BINS.value, -1]
