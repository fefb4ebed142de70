"""Whole-number weights: how they are made, read from checkpoints, packed and multiplied."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu import library
from kernels.cpu.library import Isa
from kernels.cpu.linear import pack_linear, pack_quantized
from kernels.cpu.quantize import parse, quantize, quantize_reference
from kernels.gptq_awq import unpack_awq, unpack_gptq
from kernels.quantized import InputRounding, QuantizedWeight, concatenate

needs_library = pytest.mark.skipif(library.load() is None, reason="the CPU library is not built")

KINDS = ("int8", "int8-g32", "int8-g128", "int4", "int4-g64", "int4-g128")
ROUNDING = ("w8a8", "w8a8-g32", "w4a8", "w4a8-g128")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
MAX_ROWS = 40
SUM_ERROR = 600 * 2.0**-24
X_ERROR = 2.0**-15  # of the largest magnitude of a group, where x is multiplied as whole numbers
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    """Every instruction set this machine runs."""
    before = library.isa()
    if library.set_isa(request.param) != request.param:
        library.set_isa(before)
        pytest.skip("this machine does not run it")
    yield request.param
    library.set_isa(before)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randint(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def check(weight: QuantizedWeight, dtype: torch.dtype) -> None:
    """Products against float64 of the very same numbers, and the same bits in any batch."""
    out_features, in_features = weight.values_OK.shape
    bias_O = randn(out_features, seed=1)
    x_TK = randn(MAX_ROWS, in_features, seed=2).to(dtype)
    linear = pack_quantized(weight, bias_O, dtype)
    out_TO = linear.forward_f32(x_TK)
    weight_OK = weight.dequantize()
    rounds = weight.input_rounding != "none"
    seen_TK = weight.round_inputs(x_TK).double()
    expected_TO = seen_TK @ weight_OK.T + bias_O.double()
    # With zero points the values and the zero are summed apart: both bound the error.
    size_OK = weight_OK.abs()
    if weight.zeros_OG is not None:
        size_OK = size_OK + weight.scales_OG.double().abs().max() * 16 * (1 << (weight.bits - 4))
    bound_TO = SUM_ERROR * (x_TK.double().abs() @ size_OK.T + bias_O.double().abs())
    if dtype != torch.float32 and not rounds:
        bound_TO += X_ERROR * x_TK.double().abs().amax(1, keepdim=True) * size_OK.sum(1)
    error_TO = (out_TO.double() - expected_TO).abs()
    assert bool((error_TO <= bound_TO).all()), (error_TO / bound_TO).max()
    for num_rows in (1, 2, 3, 5, 6, 7, 8, 13, 32):
        rows = slice(MAX_ROWS - num_rows, MAX_ROWS)
        assert torch.equal(linear.forward_f32(x_TK[rows]), out_TO[rows]), num_rows
    assert torch.equal(linear(x_TK), out_TO.to(dtype))


@needs_library
@pytest.mark.parametrize("kind", KINDS + ROUNDING)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_match_float64_of_the_same_numbers(
    isa: Isa, kind: str, dtype: torch.dtype
) -> None:
    for shape in ((64, 128), (33, 200), (1, 24), (96, 520), (32, 576), (7, 33)):
        check(quantize(randn(*shape), kind), dtype)


@needs_library
@pytest.mark.parametrize("kind", KINDS + ROUNDING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_not_finite_stays_so_and_in_its_row(
    isa: Isa, kind: str, dtype: torch.dtype
) -> None:
    linear = pack_quantized(quantize(randn(40, 520), kind), None, dtype)
    x_TK = randn(20, 520, seed=2).to(dtype)
    calm_TO = linear.forward_f32(x_TK)
    for row, value in ((3, torch.nan), (7, torch.inf), (11, -torch.inf)):
        x_TK[row, 400] = value
    out_TO = linear.forward_f32(x_TK)
    broken = torch.zeros(20, dtype=torch.bool)
    broken[[3, 7, 11]] = True
    assert not out_TO[broken].isfinite().any()
    assert torch.equal(out_TO[~broken], calm_TO[~broken])


@needs_library
def test_infinity_keeps_its_sign(isa: Isa) -> None:
    weight = QuantizedWeight(torch.ones(8, 64, dtype=torch.int8), torch.ones(8, 1), 8, 0)
    x_TK = torch.zeros(2, 64).half()
    x_TK[0, 5], x_TK[1, 5] = torch.inf, -torch.inf
    signs_TO = pack_quantized(weight, None, torch.float16).forward_f32(x_TK).sign()
    assert not ((signs_TO[0] < 0) | (signs_TO[1] > 0)).any()


@needs_library
@pytest.mark.parametrize("group", [0, 256])
def test_the_largest_sums_are_exact(isa: Isa, group: int) -> None:
    """256 times the largest whole number of bf16 times -128: the most that a group's sum holds."""
    values_OK = torch.full((40, 512), -128, dtype=torch.int8)
    scales_OG = torch.ones(40, 2 if group else 1)
    weight = QuantizedWeight(values_OK, scales_OG, 8, group)
    x_TK = torch.full((40, 512), 1.9921875).bfloat16()
    out_TO = pack_quantized(weight, None, torch.bfloat16).forward_f32(x_TK)
    assert bool((out_TO == -128 * 1.9921875 * 512).all())


@needs_library
@pytest.mark.parametrize("kind", KINDS + ROUNDING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_vnni_gives_the_bits_that_avx512_gives(kind: str, dtype: torch.dtype) -> None:
    before, found = library.isa(), []
    weight, x_TK = quantize(randn(40, 520), kind), randn(40, 520, seed=2).to(dtype)
    for wanted in (Isa.AVX512, Isa.AVX512_VNNI):
        is_there = library.set_isa(wanted) == wanted
        if is_there:
            found.append(pack_quantized(weight, None, dtype).forward_f32(x_TK))
        library.set_isa(before)
        if not is_there:
            pytest.skip("this machine does not run it")
    assert torch.equal(*found)


@needs_library
@pytest.mark.parametrize("kind", KINDS + ROUNDING)
def test_rows_of_a_long_prompt_have_the_bits_they_have_alone(isa: Isa, kind: str) -> None:
    """Several blocks of rows, and of k."""
    linear = pack_quantized(quantize(randn(72, 1536), kind), None, torch.bfloat16)
    x_TK = randn(300, 1536, seed=2).bfloat16()
    out_TO = linear.forward_f32(x_TK)
    for row in (0, 95, 96, 191, 299):
        assert torch.equal(linear.forward_f32(x_TK[row : row + 1]), out_TO[row : row + 1])


@needs_library
@pytest.mark.parametrize("kind", KINDS + ROUNDING)
def test_the_smallest_and_largest_of_bf16(isa: Isa, kind: str) -> None:
    """Whole rows near both ends of the range, and a row of zeros."""
    weight = quantize(randn(40, 520), kind)
    linear = pack_quantized(weight, None, torch.bfloat16)
    x_TK = randn(4, 520, seed=2).bfloat16()
    x_TK[0] *= 2.0**-90
    x_TK[1] *= 2.0**110
    x_TK[2] = 0.0
    seen_TK = weight.round_inputs(x_TK).double()
    expected_TO = seen_TK @ weight.dequantize().T
    error_TO = (linear.forward_f32(x_TK).double() - expected_TO).abs()
    assert bool((error_TO <= 1e-4 * expected_TO.abs().amax(1, keepdim=True)).all())


@needs_library
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_whole_numbers_near_their_largest_are_exact(isa: Isa, kind: str) -> None:
    """bf16 keeps 8 bits: what is within a factor of 128 of its group's largest loses nothing."""
    weight = quantize(randn(40, 256), kind)
    weight = QuantizedWeight(weight.values_OK, torch.ones_like(weight.scales_OG), weight.bits,
                             weight.group_size)  # fmt: skip
    x_TK = randint(-127, 128, 9, 256, seed=2).bfloat16()
    x_TK[:, ::32] = 127.0
    out_TO = pack_quantized(weight, None, torch.bfloat16).forward_f32(x_TK)
    assert torch.equal(out_TO, (x_TK.double() @ weight.dequantize().T).float())


@needs_library
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [8, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rounding", ["none", "group", "token"])
def test_zero_points_and_input_order(
    isa: Isa, bits: int, group: int, dtype: torch.dtype, rounding: InputRounding
) -> None:
    out_features, num_groups = 40, 3
    in_features = group * num_groups
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    weight = QuantizedWeight(
        values_OK=randint(low, high, out_features, in_features).to(torch.int8),
        scales_OG=(randn(out_features, num_groups, seed=3) * 0.1).half().float(),
        bits=bits,
        group_size=group,
        zeros_OG=randint(low, high, out_features, num_groups, seed=4).float(),
        permutation_K=torch.randperm(in_features, generator=torch.Generator().manual_seed(5)),
        input_rounding=rounding,
    )
    check(weight, dtype)


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_gives_the_numbers_of_its_reference(
    isa: Isa, kind: str, dtype: torch.dtype
) -> None:
    for shape in ((9, 200), (7, 33), (3, 8)):
        weight_OK = (randn(*shape) * 0.03).to(dtype)
        weight_OK[0] = 0.0  # a group without any magnitude
        weight_OK[1, :4] = torch.tensor([1.0, -1.0, 1.0, -1.0])  # as far on both sides
        made, expected = quantize(weight_OK, kind), quantize_reference(weight_OK, kind)
        assert torch.equal(made.values_OK, expected.values_OK)
        assert torch.equal(made.scales_OG, expected.scales_OG)


@pytest.mark.parametrize(
    ("kind", "largest_error"),
    [("int8", 0.012), ("int8-g32", 0.006), ("int4", 0.09), ("int4-g64", 0.1), ("int4-g128", 0.105)],
)
def test_quantizing_loses_no_more_than_the_grid(kind: str, largest_error: float) -> None:
    weight_OK = randn(64, 512)
    restored_OK = quantize_reference(weight_OK, kind).dequantize()
    error = (restored_OK - weight_OK.double()).norm() / weight_OK.double().norm()
    assert error <= largest_error


def test_clipping_beats_the_full_range() -> None:
    weight_OK = randn(64, 128)
    scale_O1 = weight_OK.abs().amax(1, keepdim=True) / 7
    unclipped_OK = (weight_OK / scale_O1).round() * scale_O1
    made_OK = quantize_reference(weight_OK, "int4-g128").dequantize()
    assert (made_OK - weight_OK).norm() < 0.95 * (unclipped_OK - weight_OK).norm()


def test_weights_on_the_grid_come_back_exactly() -> None:
    values_OK = randint(-7, 8, 16, 64).float()
    values_OK[:, 0], values_OK[:, 32] = 7.0, 7.0
    made = quantize_reference(values_OK * 0.125, "int4")
    assert torch.equal(made.dequantize(torch.float32), values_OK * 0.125)


def test_names_of_quantizations() -> None:
    assert [parse(kind) for kind in (*KINDS, *ROUNDING)] == [
        (8, 0, "none"),
        (8, 32, "none"),
        (8, 128, "none"),
        (4, 32, "none"),
        (4, 64, "none"),
        (4, 128, "none"),
        (8, 0, "group"),
        (8, 32, "group"),
        (4, 64, "group"),
        (4, 128, "group"),
    ]
    for wrong in ("int5", "int4-g", "int4-g48", "fp8", "none"):
        with pytest.raises(ValueError, match=r"quantization|group size"):
            parse(wrong)


def pack_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """(N, W * 32 / bits) values to (N, W) int32 words, low bits first."""
    per_word = 32 // bits
    words = torch.zeros(values.shape[0], values.shape[1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        words |= values[:, place::per_word].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq_layer(
    bits: int, group_of_K: torch.Tensor, zeros_GO: torch.Tensor, out_features: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values (K, O), scales (G, O) and the weight (O, K) in float64 that they mean."""
    values_KO = randint(0, 1 << bits, len(group_of_K), out_features)
    scales_GO = (randn(zeros_GO.shape[0], out_features, seed=6).abs() * 0.1).half()
    weight_KO = scales_GO.double()[group_of_K] * (values_KO - zeros_GO[group_of_K])
    return values_KO, scales_GO, weight_KO.T


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_layers_mean_what_they_say(bits: int, checkpoint_format: str, act_order: bool) -> None:
    in_features, out_features, group = 128, 32, 32
    group_of_K = torch.arange(in_features) // group
    if act_order:
        group_of_K = group_of_K[
            torch.randperm(in_features, generator=torch.Generator().manual_seed(5))
        ]
    zeros_GO = randint(0, 1 << bits, in_features // group, out_features, seed=7)
    values_KO, scales_GO, weight_OK = gptq_layer(bits, group_of_K, zeros_GO, out_features)
    words = pack_words(zeros_GO, bits)
    if checkpoint_format == "gptq":  # words less one at every place, borrowing like an integer
        ones = 0x11111111 if bits == 4 else 0x01010101
        words = (words.long() - ones).to(torch.int32)
    made = unpack_gptq(
        pack_words(values_KO.T, bits).T, words, scales_GO, group_of_K.int(), bits,
        checkpoint_format, group_size=group,
    )  # fmt: skip
    assert torch.equal(made.dequantize(), weight_OK)
    assert (made.permutation_K is not None) == act_order
    assert made.group_size == group


def test_gptq_per_channel_and_wide_groups() -> None:
    one_group = torch.zeros(512, dtype=torch.int64)
    for zero, group in ((8, 0), (5, 128)):  # symmetric: one scale per row; else cut into pieces
        zeros_GO = torch.full((1, 32), zero)
        values_KO, scales_GO, weight_OK = gptq_layer(4, one_group, zeros_GO, 32)
        made = unpack_gptq(
            pack_words(values_KO.T, 4).T, pack_words(zeros_GO, 4), scales_GO, None, 4, "gptq_v2",
            group_size=-1,
        )  # fmt: skip
        assert torch.equal(made.dequantize(), weight_OK)
        assert made.group_size == group


def test_gptq_tensors_that_do_not_fit_are_refused() -> None:
    values, zeros, scales = torch.zeros(16, 32).int(), torch.zeros(4, 4).int(), torch.ones(4, 32)
    with pytest.raises(ValueError, match="3-bit"):
        unpack_gptq(values, zeros, scales, None, 3, group_size=32)
    with pytest.raises(ValueError, match="unknown"):
        unpack_gptq(values, zeros, scales, None, 4, "marlin", group_size=32)
    with pytest.raises(ValueError, match="do not fit"):
        unpack_gptq(values, zeros[:2], scales, None, 4, group_size=32)
    with pytest.raises(ValueError, match="128 inputs in 2 groups"):
        unpack_gptq(values, zeros, scales, None, 4, group_size=64)
    with pytest.raises(ValueError, match="groups of other sizes than 32"):
        unpack_gptq(values, zeros, scales, torch.zeros(128).int(), 4, group_size=32)


def test_awq_layers_mean_what_they_say() -> None:
    in_features, out_features, group = 256, 48, 128
    values_KO = randint(0, 16, in_features, out_features)
    zeros_GO = randint(0, 16, in_features // group, out_features, seed=8)
    scales_GO = (randn(in_features // group, out_features, seed=9) * 0.1).half()
    weight_KO = scales_GO.double().repeat_interleave(group, 0) * (
        values_KO - zeros_GO.repeat_interleave(group, 0)
    )

    def awq(values: torch.Tensor) -> torch.Tensor:
        in_order = values.unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1)
        return pack_words(in_order, 4)

    made = unpack_awq(awq(values_KO), awq(zeros_GO), scales_GO, group_size=group)
    assert torch.equal(made.dequantize(), weight_KO.T)
    if library.load() is not None:
        check(made, torch.bfloat16)


@pytest.mark.parametrize("zero", [0.5, 8.0, -9.0])
def test_zeros_are_whole_numbers_of_its_bits(zero: float) -> None:
    values_OK, scales_OG = torch.zeros(2, 32, dtype=torch.int8), torch.ones(2, 1)
    with pytest.raises(ValueError, match="zero points are not whole numbers of 4 bits"):
        QuantizedWeight(values_OK, scales_OG, 4, 32, torch.full((2, 1), zero))


def test_fused_and_divided_layers() -> None:
    q, k = quantize_reference(randn(32, 128), "int4"), quantize_reference(randn(16, 128), "int4")
    fused = concatenate([q, k])
    assert torch.equal(fused.dequantize(), torch.cat([q.dequantize(), k.dequantize()]))
    assert torch.equal(fused.rows(32, 48).dequantize(), k.dequantize())
    assert torch.equal(fused.columns(32, 96).dequantize(), fused.dequantize()[:, 32:96])
    with pytest.raises(ValueError, match="cut a group"):
        fused.columns(16, 64)
    with pytest.raises(ValueError, match="different bits"):
        concatenate([q, quantize_reference(randn(16, 128), "int8")])


@needs_library
def test_pack_linear_quantizes_by_name() -> None:
    weight_OK, x_TK = randn(32, 64).bfloat16(), randn(3, 64, seed=1).bfloat16()
    expected = pack_quantized(quantize(weight_OK, "int4"), None, torch.bfloat16)(x_TK)
    made = pack_linear(weight_OK, None, "int4")
    assert torch.equal(made(x_TK), expected)
    assert made.num_bytes == 32 * (64 // 2 + 64 // 32 * 2)
    assert pack_linear(weight_OK, None, "int8").num_bytes == 32 * 64
