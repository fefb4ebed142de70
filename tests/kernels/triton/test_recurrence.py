"""Convolutions and recurrences with a state, against float64, whatever the batch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"

import triton  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from app.bench.gpu.recurrence_checks import (  # noqa: E402
    SMALL_RECURRENCES,
    RecurrenceCase,
    check_recurrence,
    recurrence_inputs,
    run_recurrence,
)
from kernels.recurrence import Recurrence, StateLayer, StateRows  # noqa: E402
from kernels.triton import recurrence as launcher  # noqa: E402
from kernels.triton.backend import TritonBackend  # noqa: E402
from kernels.triton.tiles import recurrence_block  # noqa: E402
from tests.kernels import recurrent_batches as batches  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CPU = torch.device("cpu")
BACKEND = TritonBackend()
SHORT = [case for case in SMALL_RECURRENCES if "chunks" not in case.name and not case.saves]
FORM = Recurrence(num_key_heads=1, num_heads=2, key_dim=8, value_dim=4, delta=True)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name.replace(" ", "-"))
def test_equal_to_float64(case: RecurrenceCase) -> None:
    results = list(check_recurrence(case, BACKEND, torch.float32, DEVICE))
    assert len(results) == 4
    for result in results:
        assert result.passed, result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_of_rounded_inputs_are_float32(dtype: torch.dtype) -> None:
    for result in check_recurrence(RecurrenceCase("", FORM, (1, 1, 9)), BACKEND, dtype, DEVICE):
        assert result.passed, result
        assert result.error <= 1e-6 or "matrix" not in result.name, result


def test_a_token_finds_its_slice_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_BLOCK_S", 2)
    case = RecurrenceCase("", FORM, (1, 1, 1, 2, 9), pad=(2, 2))
    for result in check_recurrence(case, BACKEND, torch.float32, DEVICE):
        assert result.passed, result


@pytest.mark.skipif(ON_GPU, reason="its batches are the CPU's")
def test_a_slice_has_the_same_bits_alone_and_again() -> None:
    batches.check_hybrid(FORM, BACKEND.causal_conv, BACKEND.recurrence, exact=True)


def test_launches_depend_on_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without numbers cannot be asked for any: a CUDA graph can hold the launches."""
    grids: list[tuple[int, ...]] = []

    def note(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        grids.append(tuple(grid))

    monkeypatch.setattr(triton.JITFunction, "run", note)
    monkeypatch.setattr(InterpretedFunction, "run", note)
    case = RecurrenceCase("", FORM, (1, 1, 70), pad=(8, 2))
    given = recurrence_inputs(case, torch.float16, CPU)
    rows = given.rows
    tensors = (rows.query_starts_S1, rows.reads_S, rows.writes_S)
    starts_S1, reads_S, writes_S = (tensor.to("meta") for tensor in tensors)
    given.rows = StateRows(starts_S1, reads_S, writes_S, num_decodes=5)
    run_recurrence(case, given, BACKEND)
    assert len(grids) == 4


def test_a_program_holds_all_features_of_a_key() -> None:
    sizes = ((128, 128), (256, 256), (256, 4), (100, 128), (5, 7), (1, 1))
    assert [recurrence_block(*size) for size in sizes] == [
        (128, 16), (256, 8), (256, 4), (128, 16), (8, 8), (1, 1),
    ]  # fmt: skip


def test_a_layer_without_matrices_has_no_recurrence() -> None:
    given = recurrence_inputs(RecurrenceCase("", FORM, (1,)), torch.float32, CPU)
    given.layer = StateLayer(given.layer.conv_RJC)
    with pytest.raises(ValueError, match="needs a layer with matrices"):
        run_recurrence(RecurrenceCase("", FORM, (1,)), given, BACKEND)
