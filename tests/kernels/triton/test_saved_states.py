"""States that slices save before their end, against float64."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"

from app.bench.gpu.recurrence_checks import (  # noqa: E402
    SMALL_RECURRENCES,
    RecurrenceCase,
    check_recurrence,
    recurrence_inputs,
)
from kernels.triton.backend import TritonBackend  # noqa: E402
from kernels.triton.saved_states import saves_of  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SAVED = [case for case in SMALL_RECURRENCES if case.saves]


@pytest.mark.parametrize("case", SAVED, ids=lambda case: case.name.replace(" ", "-"))
def test_equal_to_float64(case: RecurrenceCase) -> None:
    """Long slices too are computed as one that saves nothing, cut in two."""
    torch.manual_seed(0)
    for result in check_recurrence(case, TritonBackend(), torch.float16, DEVICE):
        assert result.passed, result


def test_kernels_get_tensors_also_where_nothing_is_saved() -> None:
    rows = recurrence_inputs(SAVED[0], torch.float32, DEVICE).rows
    assert saves_of(rows) == (rows.saves_S, rows.save_lengths_S, len(rows.reads_S))
    rows.saves_S = rows.save_lengths_S = None
    assert saves_of(rows) == (rows.reads_S, rows.reads_S, 0)
