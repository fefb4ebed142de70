"""Packed weights hold the numbers that they were made of, in the bytes that their bits need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.packing import QUANTIZATIONS, pack_quantized, pack_weight
from kernels.quantized import FLOAT8_ROUNDING, QuantizedWeight, quantize_rows
from kernels.torch.backend import TorchBackend


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def draw(bits: int, group: int, has_zeros: bool, size: tuple[int, int]) -> QuantizedWeight:
    highest = 1 << (bits - 1)
    scales_OG = torch.rand(size[0], -(-size[1] // group) if group else 1)
    return QuantizedWeight(
        torch.randint(-highest, highest, size, dtype=torch.int8),
        scales_OG.half().float() if group else scales_OG,
        bits,
        group,
        torch.randint(-highest, highest, scales_OG.shape).float() if has_zeros else None,
    )


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [0, 8, 32, 96, 128, 136, 256])
@pytest.mark.parametrize("size", [(5, 256), (33, 300), (1, 24)])
def test_numbers_of_a_checkpoint_stay(
    size: tuple[int, int], group: int, bits: int, has_zeros: bool
) -> None:
    weight = draw(bits, group, has_zeros and group > 0, size)
    made = pack_quantized(weight).dequantize(torch.float32)
    assert torch.equal(made, weight.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("bits", "group", "has_zeros", "num_bytes"),
    [
        # A number's bits, and per group a float16 scale and a byte of zero.
        (4, 128, True, 256 * 1024 // 2 + 256 * 8 * 3),
        (4, 128, False, 256 * 1024 // 2 + 256 * 8 * 2),
        (4, 32, True, 256 * 1024 // 2 + 256 * 32 * 3),
        (8, 64, True, 256 * 1024 + 256 * 16 * 3),
        (4, 256, True, 256 * 1024 // 2 + 256 * 8 * 3),  # in groups of 128
        (4, 16, True, 256 * 1024 + 256 * 64 * 3),  # padded to 32
    ],
)
def test_bytes(bits: int, group: int, has_zeros: bool, num_bytes: int) -> None:
    packed = pack_quantized(draw(bits, group, has_zeros, (256, 1024)))
    assert packed.num_bytes == num_bytes
    held = [t for t in (packed.codes, packed.scales, packed.zeros) if t is not None]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == num_bytes


def test_scales_that_float16_does_not_hold_stay_exact() -> None:
    weight = QuantizedWeight(torch.ones(2, 32, dtype=torch.int8), torch.full((2, 1), 1e-9), 4, 32)
    assert torch.equal(pack_quantized(weight).dequantize(torch.float32), torch.full((2, 32), 1e-9))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_quantized_at_load_are_those_of_torch(kind: str) -> None:
    weight_OK = torch.randn(48, 300)
    dense = TorchBackend().pack_linear(weight_OK.clone(), None, kind)
    made = pack_weight(weight_OK, kind).dequantize(torch.float32)
    torch.testing.assert_close(made, dense.weight_OK)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.num_bytes = max(self.num_bytes, tensor.nbytes)
        return made


def quantized(weight_OK: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales."""
    if kind in QUANTIZATIONS:
        packed = pack_weight(weight_OK, kind)
        return packed.codes, packed.scales
    rounded = quantize_rows(weight_OK, kind)
    return rounded.values_OK, rounded.scales_OG


@pytest.mark.parametrize("kind", [*QUANTIZATIONS, "w8a8", FLOAT8_ROUNDING])
@pytest.mark.parametrize("size", [(257, 300), (1000, 640), (3, 5000)])
def test_a_weight_is_quantized_in_little_memory_beside_its_codes(
    size: tuple[int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_OK = torch.randn(size).bfloat16()
    whole = quantized(weight_OK, kind)
    monkeypatch.setattr("kernels.quantized._BLOCK_BYTES", 32 << 10)
    with LargestTensor() as largest:
        in_blocks = quantized(weight_OK, kind)
    for made, wanted in zip(in_blocks, whole, strict=True):
        assert made.dtype == wanted.dtype
        assert made.is_contiguous()
        assert torch.equal(made.view(torch.uint8), wanted.view(torch.uint8))
    assert largest.num_bytes <= max(whole[0].nbytes, 34 << 10)  # a block, its groups padded


def test_four_bits_quarter_the_bytes() -> None:
    weight_OK = torch.randn(256, 1024, dtype=torch.float16)
    assert pack_weight(weight_OK, "int4").num_bytes < 0.27 * weight_OK.nbytes


def test_an_unknown_quantization_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"int3.*known: none, int8, int4, fp8"):
        pack_weight(torch.zeros(4, 4), "int3")
