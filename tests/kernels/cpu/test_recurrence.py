"""Convolutions and recurrences in C++: against PyTorch, and the same bits in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels.cpu import library

if library.load() is None:
    pytest.skip("the CPU library is not built here", allow_module_level=True)

from kernels.cpu.backend import CpuBackend
from kernels.recurrence import Recurrence, StateLayer, StateRows
from kernels.torch import recurrence as reference
from tests.kernels import recurrent_batches as batches
from tests.kernels.cpu.batches import SETS, instruction_set, threads

BACKEND = CpuBackend()
NARROW = [torch.bfloat16, torch.float16]
# one column, whole registers, parts of them, more than a block; odd numbers of rows
FORMS = [
    Recurrence(num_key_heads=2, num_heads=4, key_dim=16, value_dim=128, delta=True),
    Recurrence(num_key_heads=1, num_heads=3, key_dim=7, value_dim=37, delta=True),
    Recurrence(num_key_heads=2, num_heads=2, key_dim=33, value_dim=115, delta=False),
    Recurrence(num_key_heads=1, num_heads=1, key_dim=1, value_dim=1, delta=True),
]
# decodes, a first chunk, a later one; states saved amid a chunk and at the end of slices
LENGTHS, READS, WRITES = [1, 1, 9, 3], [0, -1, -1, 4], [1, 2, 6, 5]
SAVES = [(3, 1), (-1, 0), (8, 2), (9, 3)]
NUM_ROWS, UNTOUCHED = 10, [0, 4, 7]


@pytest.fixture(params=SETS, ids=lambda isa: isa.name.lower(), autouse=True)
def _isa(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    with instruction_set(request.param):
        yield


def hybrid() -> StateRows:
    return batches.state_rows(LENGTHS, READS, WRITES, SAVES)


def hybrid_with_an_empty_slice() -> StateRows:
    """Which is between the chunks and names rows."""
    return batches.state_rows(
        [*LENGTHS[:3], 0, *LENGTHS[3:]],
        [*READS[:3], 1, *READS[3:]],
        [*WRITES[:3], 7, *WRITES[3:]],
        [*SAVES[:3], (-1, 0), *SAVES[3:]],
    )


def convolution(
    num_channels: int, num_taps: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x within longer rows, weight, bias, states."""
    x_TC = torch.randn(num_tokens, num_channels + 3)[:, 1:-2]
    state_RJC = torch.randn(NUM_ROWS, num_taps - 1, num_channels)
    return x_TC, torch.randn(num_taps, num_channels), torch.randn(num_channels), state_RJC


@pytest.mark.parametrize("num_taps", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("num_channels", "biased", "silu"), [(21, False, True), (2605, True, False)]
)
def test_a_convolution(num_taps: int, num_channels: int, biased: bool, silu: bool) -> None:
    x_TC, weight_JC, bias_C, before_RJC = convolution(num_channels, num_taps, sum(LENGTHS))
    found_RJC, expected_RJC = before_RJC.clone(), before_RJC.clone()
    args = (x_TC, weight_JC, bias_C if biased else None)
    rows = hybrid_with_an_empty_slice()
    found_TC = BACKEND.causal_conv(*args, StateLayer(found_RJC), rows, silu)
    expected_TC = reference.causal_conv(*args, StateLayer(expected_RJC), hybrid(), silu)
    torch.testing.assert_close(found_TC, expected_TC)
    assert torch.equal(found_RJC, expected_RJC)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_recurrence(form: Recurrence) -> None:
    args = batches.inputs(form, sum(LENGTHS))
    before_RNFD = torch.randn(NUM_ROWS, form.num_heads, form.key_dim, form.value_dim)
    found_RNFD, expected_RNFD = before_RNFD.clone(), before_RNFD.clone()
    layers = [StateLayer(torch.empty(0), states) for states in (found_RNFD, expected_RNFD)]
    found_TX = BACKEND.recurrence(*args, layers[0], hybrid_with_an_empty_slice(), form)
    expected_TX = reference.recurrence(*args, layers[1], hybrid(), form)
    torch.testing.assert_close(found_TX, expected_TX, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_RNFD, expected_RNFD, rtol=1e-5, atol=1e-5)
    assert torch.equal(found_RNFD[UNTOUCHED], before_RNFD[UNTOUCHED])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_types_are_rounded_once(dtype: torch.dtype) -> None:
    """Their results are those of float32."""
    form = FORMS[1]
    x_TC, weight_JC, bias_C, state_RJC = convolution(37, 4, sum(LENGTHS))
    qkv_TC, decays_TN, rates_TN = batches.inputs(form, sum(LENGTHS), dtype)
    matrix_RNFD = torch.randn(NUM_ROWS, form.num_heads, form.key_dim, form.value_dim)
    found = []
    for wanted in (dtype, torch.float32):
        inputs_TC, before_RJC = (x.to(dtype).to(wanted) for x in (x_TC, state_RJC))
        before_RNFD = matrix_RNFD.clone()
        layer = StateLayer(before_RJC, before_RNFD)
        mixed_TC = BACKEND.causal_conv(inputs_TC, weight_JC, bias_C, layer, hybrid(), silu=True)
        args = (qkv_TC.to(wanted), decays_TN, rates_TN, layer, hybrid(), form)
        found.append((mixed_TC, BACKEND.recurrence(*args), before_RJC, before_RNFD))
    *narrow, narrow_RNFD = found[0]
    *wide, wide_RNFD = found[1]
    assert torch.equal(narrow_RNFD, wide_RNFD)
    for got, expected in zip(narrow, wide, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, expected.to(dtype))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
def test_slices_have_the_bits_that_each_has_alone(dtype: torch.dtype, count: int) -> None:
    with threads(count):
        for form in FORMS:
            batches.check_hybrid(form, BACKEND.causal_conv, BACKEND.recurrence, dtype, exact=True)


@pytest.mark.parametrize("chunks", [[4, 36], [1] * 40, [2, 1, 30, 7]], ids=str)
def test_chunks_have_the_bits_of_the_whole(chunks: list[int]) -> None:
    """Of tasks enough for two threads."""
    form = Recurrence(num_key_heads=4, num_heads=8, key_dim=64, value_dim=96, delta=True)
    qkv_TC, decays_TN, rates_TN = batches.inputs(form, 40, torch.bfloat16)
    weight_JC, bias_C = torch.randn(4, form.num_channels), torch.randn(form.num_channels)
    state_RJC = torch.full((4, 3, form.num_channels), 7.0, dtype=torch.bfloat16)
    matrix_RNFD = torch.full((4, 8, 64, 96), 7.0)
    layer = StateLayer(state_RJC, matrix_RNFD)

    def compute(tokens: slice, rows: StateRows) -> torch.Tensor:
        mixed_TC = BACKEND.causal_conv(qkv_TC[tokens], weight_JC, bias_C, layer, rows, silu=True)
        return BACKEND.recurrence(mixed_TC, decays_TN[tokens], rates_TN[tokens], layer, rows, form)

    with threads(1):
        whole_TX = batches.in_chunks([40], compute)
        state_JC, matrix_NFD = state_RJC[2].clone(), matrix_RNFD[2].clone()
    with threads(2):
        assert torch.equal(batches.in_chunks(chunks, compute), whole_TX)
    last = batches.last_row(chunks)
    assert torch.equal(state_RJC[last], state_JC)
    assert torch.equal(matrix_RNFD[last], matrix_NFD)


def test_heads_take_turns_where_keys_need_much_memory() -> None:
    form = Recurrence(num_key_heads=2, num_heads=2, key_dim=2048, value_dim=3, delta=True)
    qkv_TC, decays_TN, rates_TN = batches.inputs(form, 1100)
    layer = StateLayer(torch.empty(0), torch.zeros(4, 2, 2048, 3))

    def compute(tokens: slice, rows: StateRows) -> torch.Tensor:
        gates = (decays_TN[tokens], rates_TN[tokens])
        return BACKEND.recurrence(qkv_TC[tokens], *gates, layer, rows, form)

    whole_TX = batches.in_chunks([1100], compute)
    assert torch.equal(batches.in_chunks([300, 800], compute), whole_TX)


def test_zeros_and_places_in_memory_change_no_bits() -> None:
    """A row of zeros is what -1 reads; matrices need not lie at whole cache lines."""
    form = FORMS[0]
    args = batches.inputs(form, 3)
    size = 3 * form.num_heads * form.key_dim * form.value_dim
    found = []
    for read, offset in ((-1, 0), (0, 0), (-1, 1), (0, 1)):
        memory = torch.zeros(size + offset)[offset:]
        matrix_RNFD = memory.view(3, form.num_heads, form.key_dim, form.value_dim)
        rows = batches.state_rows([1, 2], [read, read], [1, 2])
        out_TX = BACKEND.recurrence(*args, StateLayer(torch.empty(0), matrix_RNFD), rows, form)
        found.append((out_TX, matrix_RNFD[1:]))
    for out_TX, written in found[1:]:
        assert torch.equal(out_TX, found[0][0])
        assert torch.equal(written, found[0][1])


def test_no_tokens() -> None:
    x_TC, weight_JC, bias_C, state_RJC = convolution(8, 4, 0)
    rows = batches.state_rows([0], [0], [1])
    matrix_RNFD = torch.ones(2, 2, 1, 2)
    layer = StateLayer(state_RJC, matrix_RNFD)
    form = Recurrence(num_key_heads=2, num_heads=2, key_dim=1, value_dim=2, delta=True)
    empty_TN = torch.empty(0, 2)
    assert BACKEND.causal_conv(x_TC, weight_JC, bias_C, layer, rows, True).shape == (0, 8)
    assert BACKEND.recurrence(x_TC, empty_TN, empty_TN, layer, rows, form).shape == (0, 4)
    assert bool((matrix_RNFD == 1).all())


def test_what_does_not_fit_is_refused() -> None:
    form = Recurrence(num_key_heads=1, num_heads=2, key_dim=4, value_dim=4, delta=True)
    x_TC, weight_JC, bias_C, state_RJC = convolution(16, 4, 2)
    layer = StateLayer(state_RJC, torch.zeros(NUM_ROWS, 2, 4, 4))
    rows, gates_TN = batches.state_rows([2], [0], [1]), torch.ones(2, 2)
    conv = (x_TC, weight_JC, bias_C, layer, rows, True)
    recur = (x_TC, gates_TN, gates_TN, layer, rows, form)
    odd = Recurrence(num_key_heads=2, num_heads=3, key_dim=1, value_dim=4, delta=True)
    long = torch.randn(9, 16)
    short = batches.state_rows([1], [0], [1])
    half = replace(rows, saves_S=rows.writes_S)
    for operation, args, place, wrong, match in (
        (BACKEND.causal_conv, conv, 0, x_TC[:, :8], "x_TC has shape"),
        (BACKEND.causal_conv, conv, 0, long[:2].repeat(1, 2)[:, ::2], "x_TC must be"),
        (BACKEND.causal_conv, conv, 0, x_TC.bfloat16(), "conv_RJC is torch.float32"),
        (BACKEND.causal_conv, conv, 0, x_TC.int(), "x_TC is torch.int32"),
        (BACKEND.causal_conv, conv, 1, weight_JC.bfloat16(), "weight_JC is"),
        (BACKEND.causal_conv, conv, 1, weight_JC[1:], "conv_RJC has shape"),
        (BACKEND.causal_conv, conv, 1, long, "9 taps, not 1 to 8"),
        (BACKEND.causal_conv, conv, 2, bias_C[1:], "bias_C has shape"),
        (BACKEND.causal_conv, conv, 4, short, "ends at 1, not at 2"),
        (BACKEND.recurrence, recur, 0, x_TC[:, 1:], "qkv_TC has shape"),
        (BACKEND.recurrence, recur, 1, gates_TN.double(), "decays_TN is"),
        (BACKEND.recurrence, recur, 2, gates_TN[:1], "rates_TN has shape"),
        (BACKEND.recurrence, recur, 3, StateLayer(state_RJC), "needs a layer with matrices"),
        (BACKEND.recurrence, recur, 3, StateLayer(state_RJC, torch.zeros(1)), "matrix_RNFD"),
        (BACKEND.recurrence, recur, 4, half, "one of them is missing"),
        (BACKEND.recurrence, recur, 5, odd, "num_heads 3 is not a multiple"),
    ):
        given = [*args]
        given[place] = wrong
        with pytest.raises(ValueError, match=match):
            operation(*given)
