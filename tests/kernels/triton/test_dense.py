"""Dense products of few tokens: against float64, and a row's bits alone as among others."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")

from app.bench.gpu.product_checks import check_dense
from kernels.triton import dense
from kernels.triton.backend import TritonBackend
from tests.kernels.triton.interpreted import multiply_by_rows

# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter's matrix product is wrong in bfloat16.
HALF = torch.bfloat16 if ON_GPU else torch.float16
FEW, MANY = dense.MOST_TOKENS, dense.MOST_TOKENS + 1


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each launch of our own kernel."""
    torch.manual_seed(0)
    seen: list[int] = []
    multiply = dense.DenseLinear.multiply_few

    def noted(self: dense.DenseLinear, x_TK: torch.Tensor) -> torch.Tensor:
        seen.append(len(x_TK))
        return multiply(self, x_TK)

    monkeypatch.setattr(dense.DenseLinear, "multiply_few", noted)
    return seen


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 17, FEW])
def test_few_tokens(tokens: int, biased: bool, launches: list[int]) -> None:
    result = check_dense(HALF, DEVICE, tokens, (512, 192), biased)
    assert result.passed, result
    assert launches == [tokens]


@pytest.mark.parametrize(
    ("tokens", "features", "dtype"),
    [
        (MANY, (512, 192), HALF),
        (3, (500, 192), HALF),  # a feature that no whole tile holds
        (3, (512, 190), HALF),
        (3, (512, 192), torch.float32),
    ],
)
def test_what_the_kernel_does_not_serve_is_the_library_s(
    tokens: int, features: tuple[int, int], dtype: torch.dtype, launches: list[int]
) -> None:
    result = check_dense(dtype, DEVICE, tokens, features, biased=True)
    assert result.passed, result
    assert not launches


def test_gpus_with_too_little_shared_memory_leave_it_to_the_library(
    launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer than Hopper is not enough: GPUs of workstations have 99 KiB."""
    linear = dense.DenseLinear(torch.zeros(64, 256, dtype=HALF, device=DEVICE), None, 256, 64)
    for arch, is_own in ((80, False), (89, False), (90, True), (100, True), (120, False)):
        monkeypatch.setattr(dense, "target_arch", lambda arch=arch: arch)
        launches.clear()
        linear(torch.zeros(3, 256, dtype=HALF, device=DEVICE))
        assert bool(launches) == is_own, arch


def test_a_row_has_the_same_bits_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_by_rows(monkeypatch)
    linear = TritonBackend().pack_linear(torch.randn(64, 512, device=DEVICE).to(HALF), None)
    x_TK = torch.randn(FEW, 512, device=DEVICE).to(HALF)
    together = linear(x_TK)
    for row in (0, 5, FEW - 1):
        others = torch.cat((x_TK[row : row + 1], torch.randn_like(x_TK[1:])))
        assert torch.equal(linear(others)[0], together[row])
    assert torch.equal(linear(x_TK[:1]), linear(x_TK[:9])[:1])
    assert linear(x_TK[:0]).shape == (0, 64)


def test_both_tiles_are_compiled_when_a_layer_is_loaded(launches: list[int]) -> None:
    linear = TritonBackend().pack_linear(torch.zeros(64, 256, dtype=HALF, device=DEVICE), None)
    assert isinstance(linear, dense.DenseLinear)
    assert len(launches) == (2 if ON_GPU else 0)
    launches.clear()
    linear.warm()
    assert launches == [16, FEW]
