"""Products with packed weights: against float64, in order, alone as in any batch of the same tile,
and without waiting for the device."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")

from app.bench.gpu.product_checks import STORED_CASES, check_quantized, check_stored
from app.bench.gpu.stored_case import StoredCase
from kernels.packing import pack_quantized
from kernels.torch.linear import TorchLinear
from kernels.triton.backend import TritonBackend
from kernels.triton.linear import QuantizedLinear
from tests.kernels.triton.interpreted import multiply_by_rows
from tests.kernels.triton.waits import refusing_waits

# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter's matrix product is wrong in bfloat16.
HALF = torch.bfloat16 if ON_GPU else torch.float16
BACKEND = TritonBackend()
FEATURES = [(1, (256, 96)), (5, (300, 64)), (17, (128, 130)), (70, (200, 40))]
# Groups narrower than a tile, of no power of two, wider than a tile; rows; the last group short.
ODD_CASES = (
    StoredCase(4, 8, has_zeros=True, act_order=True),
    StoredCase(4, 16, has_zeros=True),
    StoredCase(4, 96, has_zeros=True),
    StoredCase(4, 256, has_zeros=True),
    StoredCase(4, 0),
    StoredCase(8, 24, has_zeros=True),
    StoredCase(8, 200, act_order=True),
    StoredCase(8, 0),
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def case_id(case: StoredCase) -> str:
    return case.name.replace(", ", "-").replace(" ", "-")


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(("tokens", "features"), FEATURES)
def test_quantized_at_load(dtype: torch.dtype, tokens: int, features: tuple[int, int]) -> None:
    for result in check_quantized(dtype, DEVICE, tokens, features):
        assert result.passed, result


@pytest.mark.parametrize("which", range(len(FEATURES)), ids=lambda i: str(FEATURES[i][0]))
@pytest.mark.parametrize("case", STORED_CASES + ODD_CASES, ids=case_id)
def test_as_stored(case: StoredCase, which: int) -> None:
    """In float32 and in half precision by turns; many tokens, whose kernels differ, in both."""
    tokens, features = FEATURES[which]
    turn = (STORED_CASES + ODD_CASES).index(case) + which
    dtypes = [torch.float32, HALF] if tokens > 64 else [(torch.float32, HALF)[turn % 2]]
    for dtype in dtypes:
        result = check_stored(case, dtype, DEVICE, tokens, features)
        assert result.passed, result


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("case", STORED_CASES + ODD_CASES, ids=case_id)
def test_dequantized_numbers_are_rounded_once(case: StoredCase, dtype: torch.dtype) -> None:
    weight = case.draw(33, 300)
    linear = QuantizedLinear(pack_quantized(weight).to(DEVICE), None)
    made = linear.dequantize(dtype).cpu()
    expected = weight.dequantize(torch.float32)
    if weight.permutation_K is not None:
        expected = expected[:, weight.permutation_K]
    assert torch.equal(made, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("case", STORED_CASES, ids=case_id)
def test_a_token_has_the_same_bits_in_any_batch_of_a_tile(
    case: StoredCase, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_by_rows(monkeypatch)
    linear = BACKEND.pack_quantized([case.draw(70, 384)], None, dtype, DEVICE)
    x_TK = torch.randn(16, 384, device=DEVICE).to(dtype)
    together = linear(x_TK)
    for t in (0, 7, 15):
        assert torch.equal(linear(x_TK[t : t + 1])[0], together[t])
    order = torch.randperm(16, device=DEVICE)
    assert torch.equal(linear(x_TK[order]), together[order])


@pytest.mark.parametrize("tokens", [3, 70])
def test_nothing_waits_for_the_device(tokens: int) -> None:
    case = StoredCase(4, 32, has_zeros=True, act_order=True)
    linear = BACKEND.pack_quantized([case.draw(40, 96)], None, torch.float32, DEVICE)
    x_TK = torch.randn(tokens, 96, device=DEVICE)
    expected = linear(x_TK)
    with refusing_waits():
        assert torch.equal(linear(x_TK), expected)


def test_layers_of_one_input_are_one_matrix() -> None:
    case = StoredCase(4, 32, has_zeros=True)
    weights = [case.draw(48, 128), StoredCase(4, 32).draw(16, 128)]
    linear = BACKEND.pack_quantized(weights, None, torch.float32, DEVICE)
    assert isinstance(linear, QuantizedLinear)
    x_TK = torch.randn(5, 128, device=DEVICE)
    expected = torch.cat([x_TK @ w.dequantize(torch.float32).T.to(DEVICE) for w in weights], dim=1)
    torch.testing.assert_close(linear(x_TK), expected, rtol=1e-4, atol=1e-5)


def test_layers_of_different_order_are_made_dense() -> None:
    case = StoredCase(4, 32, has_zeros=True, act_order=True)
    weights = [case.draw(48, 128), case.draw(16, 128)]
    linear = BACKEND.pack_quantized(weights, None, torch.float32, DEVICE)
    assert isinstance(linear, TorchLinear)
    expected = torch.cat([weight.dequantize(torch.float32) for weight in weights])
    assert torch.equal(linear.weight_OK.cpu(), expected)
