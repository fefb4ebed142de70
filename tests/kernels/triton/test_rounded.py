"""Products of 8-bit codes with inputs rounded to 8 bits: against float64, alone as in any batch,
and what is refused."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")

from app.bench.gpu.product_checks import ROUNDED_CASES, check_rounded
from app.bench.gpu.stored_case import RoundedCase, StoredCase
from kernels.quantized import quantize_rows
from kernels.triton import backend as triton_backend
from kernels.triton.backend import TritonBackend
from kernels.triton.rounded import RoundedLinear
from tests.kernels.triton.interpreted import multiply_by_rows
from tests.kernels.triton.waits import refusing_waits

# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALF = torch.bfloat16 if ON_GPU else torch.float16
BACKEND = TritonBackend()
FEATURES = [(1, (256, 96)), (5, (300, 64)), (17, (129, 130)), (70, (1000, 40)), (40, (24, 7))]
# Groups narrower than a tile, of no power of two, wider than a tile; in another order.
ODD_CASES = (
    RoundedCase(group_size=8, by_group=True),
    RoundedCase(float8=True, group_size=48, by_group=True),
    RoundedCase(float8=True, group_size=48),
    RoundedCase(group_size=200, by_group=True, act_order=True),
    RoundedCase(float8=True, group_size=256, by_group=True),
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def case_id(case: RoundedCase) -> str:
    return case.name.replace(", ", "-").replace(" ", "-")


def drawn(case: RoundedCase, features: tuple[int, int]) -> RoundedLinear:
    K, outputs = features
    linear = BACKEND.pack_quantized([case.draw(outputs, K)], None, HALF, DEVICE)
    assert isinstance(linear, RoundedLinear)
    return linear


@pytest.mark.parametrize("which", range(len(FEATURES)), ids=lambda i: str(FEATURES[i][0]))
@pytest.mark.parametrize("case", ROUNDED_CASES + ODD_CASES, ids=case_id)
def test_products(case: RoundedCase, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 and in half precision by turns: both are rounded to the same codes, so that only
    what reads the input and writes the output differs."""
    multiply_by_rows(monkeypatch)
    tokens, features = FEATURES[which]
    turn = (ROUNDED_CASES + ODD_CASES).index(case) + which
    dtype = (torch.float32, HALF)[turn % 2]
    for result in check_rounded(case, dtype, DEVICE, tokens, features):
        assert result.passed, result


def test_sums_of_integers_are_exact() -> None:
    """Of codes that are whole numbers x is made of, with scales that are powers of two."""
    weight = RoundedCase().draw(66, 4000)
    weight.scales_OG.fill_(2.0**-6)
    for tokens in (1, 3, 33, 100):
        x_TK = torch.randint(-127, 128, (tokens, 4000)).float()
        x_TK[:, 0] = 127.5  # of which the scale is 1, and which is rounded to 127
        linear = RoundedLinear(weight, None, DEVICE)
        expected = (x_TK.long() @ weight.values_OK.long().T).float() / 64
        assert torch.equal(linear(x_TK.to(DEVICE)).cpu(), expected)


@pytest.mark.parametrize("case", ROUNDED_CASES, ids=case_id)
def test_a_token_has_the_same_bits_in_any_batch(
    case: RoundedCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any size: few tokens are summed in segments of K by several programs, many by one."""
    multiply_by_rows(monkeypatch)
    linear = drawn(case, (1100, 70))
    x_TK = torch.randn(130, 1100, device=DEVICE).to(HALF)
    together = linear.forward_f32(x_TK)
    for first, end in ((0, 1), (129, 130), (40, 57), (3, 40), (10, 80)):
        assert torch.equal(linear.forward_f32(x_TK[first:end]), together[first:end])


@pytest.mark.parametrize("quantization", ["w8a8", "fp8_w8a8"])
def test_quantized_at_load(quantization: str) -> None:
    weight_OK = torch.randn(48, 300)
    linear = BACKEND.pack_linear(weight_OK.to(DEVICE), None, quantization)
    assert isinstance(linear, RoundedLinear)
    assert linear.num_bytes == 48 * 300 + 4 * 48
    rounded = quantize_rows(weight_OK, quantization)
    step = 0.5 / 127 if quantization == "w8a8" else 2.0**-4
    near = rounded.dequantize(torch.float32) - weight_OK
    assert (near.abs() <= 1.01 * step * weight_OK.abs().amax(1, keepdim=True)).all()
    x_TK = torch.randn(20, 300)
    expected = rounded.round_inputs(x_TK).double() @ rounded.dequantize().T
    made = linear(x_TK.to(DEVICE)).cpu().double()
    assert torch.linalg.norm(made - expected) <= 1e-3 * torch.linalg.norm(expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", ROUNDED_CASES, ids=case_id)
def test_what_is_not_finite_stays_so(case: RoundedCase, value: float) -> None:
    x_TK = torch.randn(3, 256, device=DEVICE)
    x_TK[1, 200] = value
    made = drawn(case, (256, 40))(x_TK)
    assert not made[1].isfinite().any()
    assert made[[0, 2]].isfinite().all()


def test_layers_of_one_input_are_one_matrix() -> None:
    case = RoundedCase(float8=True, group_size=48, by_group=True)
    weights = [case.draw(48, 128), case.draw(16, 128)]
    linear = BACKEND.pack_quantized(weights, None, torch.float32, DEVICE)
    x_TK = torch.randn(5, 128)
    rounded = weights[0].round_inputs(x_TK)
    expected = torch.cat([rounded @ w.dequantize(torch.float32).T for w in weights], dim=1)
    torch.testing.assert_close(linear(x_TK.to(DEVICE)).cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [3, 70])
def test_nothing_waits_for_the_device(tokens: int) -> None:
    linear = drawn(RoundedCase(), (256, 40))
    x_TK = torch.randn(tokens, 256, device=DEVICE)
    expected = linear(x_TK)
    with refusing_waits():
        assert torch.equal(linear(x_TK), expected)


def test_an_old_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "target_arch", lambda: 86)
    problem = BACKEND.unsupported_quantization("fp8_w8a8")
    assert problem == "'fp8_w8a8' needs a GPU of compute capability 8.9, not 8.6"
    assert BACKEND.unsupported_quantization("w8a8") is None
    monkeypatch.setattr(triton_backend, "target_arch", lambda: 89)
    assert BACKEND.unsupported_quantization("fp8_w8a8") is None


def test_weights_that_do_not_fit_are_refused() -> None:
    for stored in (StoredCase(4, 32), StoredCase(8, 32, has_zeros=True), StoredCase(8, 32)):
        with pytest.raises(ValueError, match="inputs"):
            RoundedLinear(stored.draw(8, 64), None, DEVICE)
