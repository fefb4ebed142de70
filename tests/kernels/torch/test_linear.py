"""Packed weights multiplied in PyTorch: the bits of the dense weights that they stand for."""

from __future__ import annotations

import pytest
import torch

from kernels.quantized import QuantizedWeight
from kernels.torch.backend import TorchBackend
from kernels.torch.linear import TorchQuantizedLinear

CPU = torch.device("cpu")


def draw(out_features: int, permutation_K: torch.Tensor | None = None) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(out_features)
    return QuantizedWeight(
        torch.randint(-8, 8, (out_features, 96), generator=generator).to(torch.int8),
        torch.rand(out_features, 3, generator=generator).half().float(),
        4,
        32,
        torch.randint(-8, 8, (out_features, 3), generator=generator).float(),
        permutation_K,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_have_the_bits_of_the_dense_weight(dtype: torch.dtype) -> None:
    weights = [draw(40), draw(7)]
    bias_O, x_TK = torch.randn(47).to(dtype), torch.randn(5, 96).to(dtype)
    linear = TorchBackend().pack_quantized(weights, bias_O, dtype, CPU)
    assert isinstance(linear, TorchQuantizedLinear)
    dense_OK = torch.cat([weight.dequantize(dtype) for weight in weights])
    expected = torch.nn.functional.linear(x_TK, dense_OK, bias_O)
    assert torch.equal(linear(x_TK), expected)
    assert torch.equal(linear.forward_f32(x_TK), expected)


def test_inputs_in_act_order() -> None:
    weight = draw(40, torch.randperm(96, generator=torch.Generator().manual_seed(1)))
    linear = TorchBackend().pack_quantized([weight], None, torch.float64, CPU)
    assert isinstance(linear, TorchQuantizedLinear)
    x_TK = torch.randn(5, 96, dtype=torch.float64)
    torch.testing.assert_close(linear(x_TK), x_TK @ weight.dequantize().T)
    assert linear.num_bytes == 40 * (96 // 2 + 3 * 3) + 96 * 4
