"""Norms, activation, rotation and cache writes in C++: against float64 and Hugging Face."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.cpu import library

if library.load() is None:
    pytest.skip("the CPU library is not built here", allow_module_level=True)

from kernels.cpu.backend import CpuBackend
from kernels.interface import AttentionShape
from kernels.layer_form import ACTIVATIONS
from kernels.torch.backend import TorchBackend
from tests.kernels.cpu.batches import (
    SETS,
    instruction_set,
    make_batch,
    make_tables,
    rotation,
    threads,
)

BACKEND = CpuBackend()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SIZES = [(1, 8), (3, 576), (5, 33), (40, 100), (70, 4096), (2, 1)]


@pytest.fixture(params=SETS, ids=lambda isa: isa.name.lower(), autouse=True)
def _isa(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    with instruction_set(request.param):
        yield


def hugging_face_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x_TH.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight_H * scaled.to(x_TH.dtype)


def hugging_face_rotation(x_TND: torch.Tensor, cos_sin_TD: torch.Tensor) -> torch.Tensor:
    cos, sin = (part.to(x_TND.dtype).repeat(1, 2)[:, None] for part in cos_sin_TD.chunk(2, dim=1))
    first, second = x_TND.chunk(2, dim=-1)
    return x_TND * cos + torch.cat((-second, first), dim=-1) * sin


def assert_rounds_alike(got: torch.Tensor, expected: torch.Tensor, step: float) -> None:
    """Equal but for sums in another order, which move a value across a rounding boundary now and
    then: at most one step, and in bf16 and fp16 for few values."""
    error = (got.double() - expected.double()).abs()
    assert (error <= 2 * step * expected.double().abs() + 1e-7).all(), error.max()
    if step > 1e-5 and got.numel() > 1000:
        assert (error > 0).double().mean() < 0.01


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(size: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(size) * 3).to(dtype)
    weight = (1 + 0.1 * torch.randn(size[1])).to(dtype)
    got = BACKEND.rms_norm(x, weight, 1e-5)
    assert_rounds_alike(got, hugging_face_norm(x, weight, 1e-5), STEP[dtype])
    wide = x.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert ((got.double() - exact).abs() <= 1.1 * STEP[dtype] * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(size: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    weight = torch.randn(size[1]).to(dtype)
    expected_residual = residual + x
    got = BACKEND.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(got, BACKEND.rms_norm(residual, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_with_weights_in_float32_rounds_once(dtype: torch.dtype) -> None:
    """As Gemma's in Hugging Face, alone and with the rotation; the torch form does the same."""
    x, weight = (torch.randn(7, 66) * 3).to(dtype), 1 + 0.1 * torch.randn(66)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    for backend in (BACKEND, TorchBackend()):
        got = backend.rms_norm(x, weight, 1e-5)
        assert got.dtype == dtype
        assert ((got.double() - exact).abs() <= 0.51 * STEP[dtype] * exact.abs() + 1e-6).all()
        residual = torch.zeros_like(x)
        assert torch.equal(backend.add_rms_norm(x, residual, weight, 1e-5), got)
    shape, dim = AttentionShape(2, 1, 16, scale=1.0), 16
    tables, num_blocks = make_tables([5], 16)
    batch = make_batch([(0, 5)], tables, 16)
    qkv, head_weight = torch.randn(5, 4 * dim).to(dtype), 1 + 0.1 * torch.randn(dim)
    (layer,) = BACKEND.allocate_kv(1, num_blocks, 16, shape, dtype, torch.device("cpu"))
    table = rotation(16, dim)
    q = BACKEND.rope_and_cache(qkv, table, batch, layer, shape, head_weight, head_weight, eps=1e-5)
    normed = BACKEND.rms_norm(qkv.view(-1, dim), head_weight, 1e-5).view(5, 4, dim)[:, :2]
    assert torch.equal(q, hugging_face_rotation(normed, table[batch.positions_T.long()]))
    half = head_weight.to(dtype)
    with pytest.raises(ValueError, match="two types"):
        BACKEND.rope_and_cache(qkv, table, batch, layer, shape, half, head_weight, eps=1e-5)


@pytest.mark.parametrize("size", [(1, 16), (7, 66), (40, 3072)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(size: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(size) * 8).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    got = BACKEND.activate(gate_up, "silu", gated=True)
    rounded_once = functional.silu(gate.float()) * up.float()
    assert_rounds_alike(got, rounded_once.to(dtype), STEP[dtype])
    exact = gate.double() * gate.double().sigmoid() * up.double()
    assert ((got.double() - exact).abs() <= 1.1 * STEP[dtype] * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("size", [(3, 576), (5, 33), (2, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(size: tuple[int, int], dtype: torch.dtype, biased: bool) -> None:
    x = (2 + torch.randn(size) * 3).to(dtype)
    weight, bias = (1 + 0.1 * torch.randn(size[1])).to(dtype), torch.randn(size[1]).to(dtype)
    got = BACKEND.layer_norm(x, weight, bias if biased else None, 1e-5)
    exact = functional.layer_norm(
        x.double(), size[1:], weight.double(), bias.double() if biased else None, 1e-5
    )
    assert ((got.double() - exact).abs() <= 1.1 * STEP[dtype] * exact.abs() + 3e-6).all()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(dtype: torch.dtype, activation: str, gated: bool) -> None:
    x = torch.cat((torch.linspace(-30, 30, 9_998), torch.randn(10_002))).view(100, 200).to(dtype)
    exact = TorchBackend().activate(x.double(), activation, gated)
    error = (BACKEND.activate(x, activation, gated).double() - exact).abs()
    assert (error <= 1.1 * STEP[dtype] * exact.abs() + 1e-6 * x.double().abs().max()).all()


def test_a_row_has_the_same_bits_in_every_company() -> None:
    x, weight = torch.randn(300, 576).bfloat16(), torch.randn(576).bfloat16()

    def compute(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            BACKEND.rms_norm(rows, weight, 1e-5),
            BACKEND.activate(rows, "silu", gated=True),
            BACKEND.layer_norm(rows, weight, None, 1e-5),
            BACKEND.activate(rows, "gelu", gated=False),
        )

    with threads(3):
        many = compute(x)
    with threads(1):
        one = [compute(row) for row in x.split(1)]
    for together, alone in zip(many, zip(*one, strict=True), strict=True):
        assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("heads", [(9, 3, 64), (2, 2, 8), (4, 1, 80), (3, 1, 256)], ids=str)
@pytest.mark.parametrize("norms", ["plain", "norm", "norms_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_rounds_where_hugging_face_does(
    dtype: torch.dtype, norms: str, heads: tuple[int, int, int]
) -> None:
    num_heads, num_kv_heads, dim = heads
    last = norms == "norms_last"
    shape = AttentionShape(num_heads, num_kv_heads, dim, scale=1.0, norms_last=last)
    slices = [(30, 1), (7, 1), (0, 60), (5, 3)]
    tables, num_blocks = make_tables([31, 8, 60, 8], 16)
    batch = make_batch(slices, tables, 16)
    (layer,) = BACKEND.allocate_kv(1, num_blocks, 16, shape, dtype, torch.device("cpu"))
    qkv = torch.randn(65, num_heads + 2 * num_kv_heads, dim).to(dtype)
    table = rotation(60, dim)
    norm = (1 + 0.1 * torch.randn(dim)).to(dtype) if norms != "plain" else None
    with threads(3):
        q = BACKEND.rope_and_cache(qkv.flatten(1), table, batch, layer, shape, norm, norm, eps=1e-5)
    expected = qkv[:, :num_heads]
    for step in ("rotate", "norm") if last else ("norm", "rotate"):
        if step == "rotate":
            expected = hugging_face_rotation(expected, table[batch.positions_T.long()])
        elif norm is not None:
            flat = expected.reshape(-1, dim)
            expected = BACKEND.rms_norm(flat, norm, 1e-5).view_as(expected)
    if dtype == torch.float32:
        torch.testing.assert_close(q, expected, rtol=2e-6, atol=2e-6)
    else:
        assert torch.equal(q, expected)


@pytest.mark.parametrize("block_size", [16, 32, 8, 5])
@pytest.mark.parametrize("kv_dtype", [*DTYPES, torch.int8], ids=str)
def test_the_cache_holds_the_rotated_keys_and_the_values(
    kv_dtype: torch.dtype, block_size: int
) -> None:
    """Read back through attention: a large query parallel to one key picks its value."""
    dim, length = 32, 40
    shape = AttentionShape(1, 1, dim, scale=1.0)
    tables, num_blocks = make_tables([length], block_size)
    cpu = torch.device("cpu")
    (layer,) = BACKEND.allocate_kv(1, num_blocks, block_size, shape, kv_dtype, cpu)
    table = rotation(length, dim)
    k = functional.normalize(torch.randn(length, dim), dim=1)
    v = torch.randn(length, dim)
    qkv = torch.cat((torch.zeros(length, dim), k, v), dim=1)
    for first, count in ((0, 13), (13, 1), (14, 26)):
        batch = make_batch([(first, count)], tables, block_size)
        BACKEND.rope_and_cache(qkv[first : first + count].contiguous(), table, batch, layer, shape)
    rotated = hugging_face_rotation(k[:, None], table)
    last = make_batch([(length - 1, 1)], tables, block_size)
    for i in range(length):
        out = BACKEND.attention(200 * rotated[i : i + 1].contiguous(), last, layer, shape)
        torch.testing.assert_close(out[0], v[i], rtol=0, atol=0.03)


def test_a_position_behind_the_table_is_refused() -> None:
    shape = AttentionShape(1, 1, 8, scale=1.0)
    tables, num_blocks = make_tables([9], 16)
    (layer,) = BACKEND.allocate_kv(1, num_blocks, 16, shape, torch.float32, torch.device("cpu"))
    batch = make_batch([(0, 9)], tables, 16)
    with pytest.raises(ValueError, match="position 8 lies past"):
        BACKEND.rope_and_cache(torch.zeros(9, 24), rotation(8, 8), batch, layer, shape)


def test_refusals_name_the_argument() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight_H"):
        BACKEND.rms_norm(x, torch.zeros(7), 1e-5)
    with pytest.raises(ValueError, match="x_TH"):
        BACKEND.rms_norm(x.t(), torch.zeros(2), 1e-5)
    with pytest.raises(ValueError, match="residual_TH"):
        BACKEND.add_rms_norm(x, x.bfloat16(), torch.zeros(8), 1e-5)
    with pytest.raises(ValueError, match="odd width"):
        BACKEND.activate(torch.zeros(2, 7), "silu", gated=True)
    with pytest.raises(ValueError, match="floating"):
        BACKEND.activate(torch.zeros(2, 8, dtype=torch.int32), "silu", gated=True)
