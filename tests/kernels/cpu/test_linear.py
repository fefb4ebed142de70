"""Packed linear layers: against float64, and bit for bit alone and in any batch."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator

import pytest
import torch

from kernels.cpu import library
from kernels.cpu.library import Isa
from kernels.cpu.linear import CpuHeadLinears, CpuLinear, pack_linear

pytestmark = pytest.mark.skipif(library.load() is None, reason="the CPU library is not built")

# Outputs and inputs: whole panels, odd sizes, single ones, several k blocks, paired halves or not.
SHAPES = ((64, 64), (33, 40), (17, 19), (1, 7), (50, 1), (96, 200), (160, 400), (31, 8))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the sum of |x w| over k: float32 sums of up to 400 products, in one chain.
SUM_ERROR = 400 * 2.0**-24
MAX_ROWS = 70


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    """Every instruction set this machine runs."""
    before = library.isa()
    if library.set_isa(request.param) != request.param:
        library.set_isa(before)
        pytest.skip("this machine does not run it")
    yield request.param
    library.set_isa(before)


def make(
    out_features: int, in_features: int, dtype: torch.dtype, bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Weight, bias and MAX_ROWS rows of input."""
    generator = torch.Generator().manual_seed(out_features * 1000 + in_features)
    weight_OK = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias_O = torch.randn(out_features, generator=generator).to(dtype) if bias else None
    x_TK = torch.randn(MAX_ROWS, in_features, generator=generator).to(dtype)
    return weight_OK, bias_O, x_TK


def assert_close_to_float64(
    out_TO: torch.Tensor, x_TK: torch.Tensor, weight_OK: torch.Tensor, bias_O: torch.Tensor | None
) -> None:
    """Within the rounding of a float32 sum over k."""
    x_TK, weight_OK = x_TK.double(), weight_OK.double()
    expected_TO = x_TK @ weight_OK.T
    bound_TO = x_TK.abs() @ weight_OK.abs().T
    if bias_O is not None:
        expected_TO = expected_TO + bias_O.double()
        bound_TO = bound_TO + bias_O.double().abs()
    error_TO = (out_TO.double() - expected_TO).abs()
    assert bool((error_TO <= SUM_ERROR * bound_TO).all()), (error_TO / bound_TO).max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight_OK, bias_O, x_TK = make(*shape, dtype)
    linear = pack_linear(weight_OK, bias_O)
    out_TO = linear.forward_f32(x_TK)
    assert_close_to_float64(out_TO, x_TK, weight_OK, bias_O)
    assert torch.equal(linear(x_TK), out_TO.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight_OK, bias_O, x_TK = make(*shape, dtype)
    linear = pack_linear(weight_OK, bias_O)
    whole_TO = linear.forward_f32(x_TK)
    for num_rows in range(1, MAX_ROWS + 1):
        first = (num_rows * 7) % (MAX_ROWS - num_rows + 1)
        rows = slice(first, first + num_rows)
        assert torch.equal(linear.forward_f32(x_TK[rows]), whole_TO[rows]), num_rows


def test_batches_of_several_row_blocks_keep_the_bits() -> None:
    weight_OK, bias_O, x_TK = make(160, 400, torch.bfloat16)
    linear = pack_linear(weight_OK, bias_O)
    many_TK = x_TK.repeat(9, 1)  # several of AMX's blocks too, the last one not whole
    assert torch.equal(linear(many_TK), linear(x_TK).repeat(9, 1))


def test_number_of_threads_changes_no_bit() -> None:
    weight_OK, bias_O, x_TK = make(160, 400, torch.bfloat16)
    linear = pack_linear(weight_OK, bias_O)
    before = library.num_threads()
    expected = linear(x_TK)
    try:
        for count in (1, 2, 3, 5):
            library.set_num_threads(count)
            assert library.num_threads() == count
            assert torch.equal(linear(x_TK), expected)
    finally:
        library.set_num_threads(before)


def test_infinities_and_nan_stay_in_their_row() -> None:
    weight_OK, _, x_TK = make(33, 40, torch.bfloat16, bias=False)
    linear = pack_linear(weight_OK)
    expected_TO = linear(x_TK)
    x_TK[3, 5] = float("nan")
    x_TK[4, 39] = float("inf")
    out_TO = linear(x_TK)
    assert bool(out_TO[3].isnan().all())
    assert not bool(out_TO[4].isfinite().any())
    others = [row for row in range(MAX_ROWS) if row not in (3, 4)]
    assert torch.equal(out_TO[others], expected_TO[others])


def test_memory_past_an_odd_row_is_not_read() -> None:
    weight_OK, _, x_TK = make(17, 19, torch.bfloat16, bias=False)
    padded_TK = torch.full((MAX_ROWS, 32), float("nan"), dtype=torch.bfloat16)
    padded_TK[:, :19] = x_TK
    linear = pack_linear(weight_OK)
    assert torch.equal(linear(padded_TK[:, :19]), linear(x_TK))


def test_strided_input_and_output_rows() -> None:
    weight_OK, bias_O, x_TK = make(64, 64, torch.bfloat16)
    linear = pack_linear(weight_OK, bias_O)
    wide_TK = torch.zeros(MAX_ROWS, 100, dtype=torch.bfloat16)
    wide_TK[:, 10:74] = x_TK
    assert torch.equal(linear(wide_TK[:, 10:74]), linear(x_TK))
    assert torch.equal(linear(x_TK.T.contiguous().T), linear(x_TK))


@pytest.mark.parametrize(
    "quantization", ["none", "int8", "int4-g64", "int4-g128", "w8a8", "w4a8-g128"]
)
def test_rows_alone_and_among_hundreds_have_the_same_bits(quantization: str) -> None:
    """So many, and so long, that AMX reads x in several slabs beside several panels of a task, and
    the last pass is half empty."""
    generator = torch.Generator().manual_seed(1)
    weight_OK = torch.randn(1056, 2240, generator=generator).bfloat16()
    x_TK = torch.randn(525, 2240, generator=generator).bfloat16()
    linear = pack_linear(weight_OK, None, quantization)
    num_threads = library.num_threads()
    library.set_num_threads(1)
    try:
        out_TO = linear(x_TK)
    finally:
        library.set_num_threads(num_threads)
    for num_rows in (1, 40):
        for begin in (0, 31, 485):
            rows = slice(begin, begin + num_rows)
            assert torch.equal(linear(x_TK[rows]), out_TO[rows]), (begin, num_rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_are_layers_of_their_own(dtype: torch.dtype) -> None:
    """Of rows that lie within longer ones, too."""
    weight_NOK = torch.randn(3, 33, 40).to(dtype)
    heads = CpuHeadLinears(weight_NOK)
    for x_TNK in (torch.randn(5, 3, 40), torch.randn(5, 5, 40)[:, 1:4]):
        x_TNK = x_TNK.to(dtype)
        wanted = [pack_linear(w_OK)(x_TNK[:, n]) for n, w_OK in enumerate(weight_NOK)]
        assert torch.equal(heads(x_TNK), torch.stack(wanted, 1))
    assert heads(torch.zeros(0, 3, 40, dtype=dtype)).shape == (0, 3, 33)
    with pytest.raises(ValueError, match="x is"):
        heads(torch.zeros(5, 2, 40, dtype=dtype))


def test_no_rows_and_wrong_input() -> None:
    linear = pack_linear(torch.ones(4, 8))
    assert linear(torch.empty(0, 8)).shape == (0, 4)
    with pytest.raises(ValueError, match="not \\(T, 8\\)"):
        linear(torch.ones(1, 9))
    with pytest.raises(ValueError, match="float32"):
        linear(torch.ones(1, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="no CPU kernel"):
        pack_linear(torch.ones(4, 8, dtype=torch.float64))


def test_the_weight_is_freed_with_its_object() -> None:
    linear = pack_linear(torch.ones(64, 64))
    finalizer = linear._finalizer
    gone = weakref.ref(linear)
    del linear
    gc.collect()
    assert gone() is None
    assert not finalizer.alive


def test_the_packed_copy_does_not_need_the_original() -> None:
    weight_OK, bias_O, x_TK = make(64, 64, torch.float32)
    linear = pack_linear(weight_OK, bias_O)
    expected_TO = linear(x_TK)
    weight_OK.zero_()
    assert torch.equal(linear(x_TK), expected_TO)


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    weight_OK, bias_O, x_TK = make(160, 400, torch.bfloat16)
    linear: CpuLinear = pack_linear(weight_OK, bias_O)
    expected_TO = linear(x_TK)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear(x_TK), expected_TO) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(linear(x_TK), expected_TO)


def test_streaming_read_adds_up() -> None:
    values = torch.arange(300_000, dtype=torch.float32) % 7
    assert library.stream_read(values) == values.double().sum().item()
    with pytest.raises(ValueError, match="contiguous float32"):
        library.stream_read(values.double())
