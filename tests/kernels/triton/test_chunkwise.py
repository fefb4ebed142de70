"""Recurrences over long slices, whose chunks are matrix products, against float64."""

from __future__ import annotations

import os
from collections.abc import Callable

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
from kernels.recurrence import Recurrence  # noqa: E402
from kernels.triton import chunkwise, reference  # noqa: E402
from kernels.triton.backend import TritonBackend  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BACKEND = TritonBackend()
FORM = Recurrence(num_key_heads=1, num_heads=1, key_dim=16, value_dim=16, delta=True)
CHUNKS = [case for case in SMALL_RECURRENCES if "chunks" in case.name and not case.saves]


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the batches that are given to the kernels of long slices."""
    seen: list[int] = []
    run = chunkwise.long_slices

    def note(qkv_TC: torch.Tensor, *args: object) -> None:
        seen.append(len(qkv_TC))
        run(qkv_TC, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(chunkwise, "long_slices", note)
    return seen


@pytest.mark.parametrize("case", CHUNKS, ids=lambda case: case.name.replace(" ", "-"))
def test_equal_to_float64(case: RecurrenceCase, computed: list[int]) -> None:
    for result in check_recurrence(case, BACKEND, torch.float16, DEVICE):
        assert result.passed, result
        if not ON_GPU and "matrix" in result.name:  # whose products are interpreted in float32
            assert result.error <= 2e-5, result
    assert computed == [sum(case.lengths) + case.pad[0]]


@pytest.mark.parametrize(
    ("decay_of", "alike"),
    [(torch.ones_like, False), (torch.ones_like, True), (lambda x: (x > 0.1) * x, False)],
    ids=["nothing is forgotten", "nor do keys differ", "all is forgotten at times"],
)
def test_extreme_gates(decay_of: Callable[[torch.Tensor], torch.Tensor], alike: bool) -> None:
    """With rates of 1, which replace what a key has stored."""
    given = recurrence_inputs(RecurrenceCase("", FORM, (100,)), torch.float16, DEVICE)
    if alike:
        given.qkv_TC[:, :32] = given.qkv_TC[:1, :32].clone()
    decays_TN, rates_TN = decay_of(given.decays_TN), torch.ones_like(given.rates_TN)
    assert given.layer.matrix_RNFD is not None
    old_NFD = torch.zeros_like(given.layer.matrix_RNFD[0])
    args = (given.qkv_TC, decays_TN, rates_TN)
    out_TX = BACKEND.recurrence(*args, given.layer, given.rows, FORM)
    expected, left_NFD = reference.recurrence(*args, old_NFD, FORM)
    assert reference.relative_error(out_TX, expected) <= 3e-3
    found_NFD = given.layer.matrix_RNFD[int(given.rows.writes_S[0])]
    assert reference.relative_error(found_NFD, left_NFD) <= (3e-3 if ON_GPU else 1e-4)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (RecurrenceCase("of decodes' shape", FORM, (64,), pad=(0, 63)), torch.float16),
        (RecurrenceCase("float32", FORM, (64,)), torch.float32),
        (RecurrenceCase("keys of 129", Recurrence(1, 1, 129, 4, delta=True), (64,)), torch.float16),
    ],
    ids=lambda given: given.name if isinstance(given, RecurrenceCase) else "",
)
def test_other_long_slices_are_computed_token_by_token(
    case: RecurrenceCase, dtype: torch.dtype, computed: list[int]
) -> None:
    for result in check_recurrence(case, BACKEND, dtype, DEVICE):
        assert result.passed, result
    assert not computed
