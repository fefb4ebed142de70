"""The fused decoder stack gives the bits that the operations give one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cpu import library

if library.load() is None:
    pytest.skip("the CPU library is not built here", allow_module_level=True)

from kernels.cpu.backend import CpuBackend
from kernels.interface import AttentionShape, Batch, KVLayer
from kernels.layer_form import LayerForm
from kernels.layer_weights import LayerWeights
from tests.kernels.cpu.batches import (
    SETS,
    instruction_set,
    make_batch,
    make_tables,
    rotation,
    threads,
)
from tests.kernels.cpu.sequences import alibi_table

BACKEND = CpuBackend()
EPS = 1e-5


@pytest.fixture(params=SETS, ids=lambda isa: isa.name.lower(), autouse=True)
def _isa(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    with instruction_set(request.param):
        yield


def make_layers(
    hidden: int,
    inner: int,
    shape: AttentionShape,
    dtype: torch.dtype,
    *,
    biased: bool,
    normed: bool,
    windows: list[int | None],
    sinks: bool = False,
    scaled: bool = False,
    quantization: str = "none",
) -> list[LayerWeights]:
    def linear(out_features: int, in_features: int):  # type: ignore[no-untyped-def]
        weight = (torch.randn(out_features, in_features) * in_features**-0.5).to(dtype)
        bias = torch.randn(out_features).to(dtype) if biased else None
        return BACKEND.pack_linear(weight, bias, quantization)

    def norm(width: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(width)).to(dtype)

    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    return [
        LayerWeights(
            input_norm_H=norm(hidden),
            qkv=linear((heads + 2 * kv_heads) * dim, hidden),
            out=linear(hidden, heads * dim),
            post_norm_H=norm(hidden),
            gate_up=linear(2 * inner, hidden),
            down=linear(hidden, inner),
            q_norm_D=norm(dim) if normed else None,
            k_norm_D=norm(dim) if normed else None,
            sliding_window=window,
            sinks_N=torch.randn(heads) if sinks else None,
            query_scales_P=1 + torch.rand(64) if scaled and window is None else None,
        )
        for window in windows
    ]


def one_by_one(
    layers: list[LayerWeights],
    kv: list[KVLayer],
    table: torch.Tensor,
    shape: AttentionShape,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    batch: Batch,
) -> tuple[torch.Tensor, torch.Tensor]:
    for w, cache in zip(layers, kv, strict=True):
        own = replace(shape, sliding_window=w.sliding_window, sinks_N=w.sinks_N)
        if residual is None:
            residual, x = x, BACKEND.rms_norm(x, w.input_norm_H, EPS)
        else:
            x = BACKEND.add_rms_norm(x, residual, w.input_norm_H, EPS)
        q = BACKEND.rope_and_cache(w.qkv(x), table, batch, cache, own, w.q_norm_D, w.k_norm_D, EPS)
        if w.query_scales_P is not None:
            q = (q * w.query_scales_P[batch.positions_T.long()][:, None, None]).to(q.dtype)
        x = w.out(BACKEND.attention(q, batch, cache, own))
        x = BACKEND.add_rms_norm(x, residual, w.post_norm_H, EPS)
        x = w.down(BACKEND.activate(w.gate_up(x), "silu", gated=True))
    assert residual is not None
    return x, residual


MODELS = {
    "llama": ((6, 2, 32), 96, 160, torch.bfloat16, {}),
    "odd": ((3, 1, 40), 72, 52, torch.bfloat16, {}),  # gate and up cannot be fused
    "qwen": ((4, 2, 16), 64, 96, torch.bfloat16, {"biased": True, "normed": True}),
    "windows": ((4, 2, 16), 64, 96, torch.bfloat16, {"windows": [None, 20, 5, None]}),
    "chunks": ((4, 2, 16), 64, 96, torch.bfloat16, {"windows": [None, 20], "chunked": True}),
    "sinks": ((4, 2, 16), 64, 96, torch.float32, {"windows": [None, 20], "sinks": True}),
    "scales": ((3, 1, 40), 64, 96, torch.bfloat16, {"windows": [None, 20], "scaled": True}),
    "norms last": ((4, 2, 16), 64, 96, torch.bfloat16, {"normed": True, "norms_last": True}),
    "float": ((6, 2, 32), 96, 160, torch.float32, {}),
    "half": ((6, 2, 32), 96, 160, torch.float16, {}),
    "int8": ((6, 2, 32), 96, 160, torch.bfloat16, {"quantization": "int8"}),
    "int4": ((4, 2, 32), 128, 256, torch.bfloat16, {"quantization": "int4"}),
    "w8a8": ((6, 2, 32), 96, 160, torch.bfloat16, {"quantization": "w8a8"}),
}


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["kv", "int8kv"])
@pytest.mark.parametrize("model", MODELS)
def test_fused_is_one_by_one(model: str, kv_dtype: torch.dtype | None) -> None:
    heads, hidden, inner, dtype, options = MODELS[model]
    options = {"biased": False, "normed": False, "windows": [None] * 3, **options}
    of_shape = {name: bool(options.pop(name, False)) for name in ("chunked", "norms_last")}
    shape = AttentionShape(*heads, scale=heads[2] ** -0.5, **of_shape)
    layers = make_layers(hidden, inner, shape, dtype, **options)  # type: ignore[arg-type]
    tables, num_blocks = make_tables([60, 30, 45], 16)
    table = rotation(64, heads[2])
    cpu = torch.device("cpu")
    caches = [
        BACKEND.allocate_kv(len(layers), num_blocks, 16, shape, kv_dtype or dtype, cpu)
        for _ in range(2)
    ]
    stack = BACKEND.decoder_stack(layers, caches[0], table, shape, LayerForm(EPS))
    steps = [
        ([0], [(0, 50)], False),
        ([0, 1, 2], [(50, 1), (0, 29), (0, 40)], True),
        ([0, 1, 2], [(51, 1), (29, 1), (40, 5)], False),
        ([0], [(52, 1)], True),
    ]
    for rows, slices, with_residual in steps:
        batch = make_batch(slices, tables[rows], 16)
        x = torch.randn(batch.positions_T.shape[0], hidden).to(dtype)
        residual = torch.randn_like(x) if with_residual else None
        copies = x.clone(), None if residual is None else residual.clone()
        with threads(2):
            got = stack(x, residual, batch)
        with threads(1):
            expected = one_by_one(layers, caches[1], table, shape, *copies, batch)  # type: ignore[arg-type]
        assert torch.isfinite(got[0]).all()
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
    for mine, other in zip(*caches, strict=True):
        assert torch.equal(mine.data, other.data)


def test_a_prompt_has_the_same_bits_in_chunks_and_among_neighbors() -> None:
    shape = AttentionShape(6, 2, 32, scale=32**-0.5)
    layers = make_layers(
        96, 160, shape, torch.bfloat16, biased=False, normed=False, windows=[None] * 3
    )
    tables, num_blocks = make_tables([300, 100], 16)
    table = rotation(300, 32)
    x = torch.randn(300, 96).bfloat16()
    other = torch.randn(100, 96).bfloat16()
    outs = []
    for chunk, neighbor in ((300, False), (64, True), (7, False)):
        caches = BACKEND.allocate_kv(3, num_blocks, 16, shape, torch.bfloat16, torch.device("cpu"))
        stack = BACKEND.decoder_stack(layers, caches, table, shape, LayerForm(EPS))
        parts = []
        for number, start in enumerate(range(0, 300, chunk)):
            count = min(chunk, 300 - start)
            rows, slices, inputs = [0], [(start, count)], [x[start : start + count]]
            if neighbor:  # in front of the chunk, so that its rows shift
                rows, slices, inputs = (
                    [1, 0],
                    [(number, 1), *slices],
                    [other[number][None], *inputs],
                )
            batch = make_batch(slices, tables[rows], 16)
            y, residual = stack(torch.cat(inputs), None, batch)
            parts.append((y + residual)[-count:])
        outs.append(torch.cat(parts))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_alibi_reaches_every_layer() -> None:
    shape = AttentionShape(6, 6, 16, scale=0.25, alibi_NP=alibi_table(6, 50))
    options = {"biased": False, "normed": False, "windows": [None] * 3}
    layers = make_layers(96, 160, shape, torch.bfloat16, **options)  # type: ignore[arg-type]
    tables, num_blocks = make_tables([60], 16)
    table, cpu = rotation(64, 16), torch.device("cpu")
    fused, single, plain = (
        BACKEND.allocate_kv(3, num_blocks, 16, shape, torch.bfloat16, cpu) for _ in range(3)
    )
    x, batch = torch.randn(50, 96).bfloat16(), make_batch([(0, 50)], tables, 16)
    stack = BACKEND.decoder_stack(layers, fused, table, shape, LayerForm(EPS))
    got, _ = stack(x.clone(), None, batch)
    expected, _ = one_by_one(layers, single, table, shape, x.clone(), None, batch)
    assert torch.equal(got, expected)
    without = replace(shape, alibi_NP=None)
    unlike, _ = one_by_one(layers, plain, table, without, x.clone(), None, batch)
    assert not torch.equal(got, unlike)
    with pytest.raises(ValueError, match="position 50 lies past the 50"):
        stack(torch.zeros(51, 96).bfloat16(), None, make_batch([(0, 51)], tables, 16))


def test_what_does_not_fit_is_refused() -> None:
    shape = AttentionShape(4, 2, 16, scale=0.25)
    options = {"biased": False, "normed": False, "windows": [None]}
    layers = make_layers(64, 96, shape, torch.bfloat16, **options)  # type: ignore[arg-type]
    tables, num_blocks = make_tables([20], 16)
    caches = BACKEND.allocate_kv(1, num_blocks, 16, shape, torch.bfloat16, torch.device("cpu"))
    stack = BACKEND.decoder_stack(layers, caches, rotation(16, 16), shape, LayerForm(EPS))
    batch = make_batch([(0, 10)], tables, 16)
    with pytest.raises(ValueError, match="x is"):
        stack(torch.zeros(9, 64).bfloat16(), None, batch)
    with pytest.raises(ValueError, match="x is"):
        stack(torch.zeros(10, 64), None, batch)
    with pytest.raises(ValueError, match="position 19"):
        stack(torch.zeros(20, 64).bfloat16(), None, make_batch([(0, 20)], tables, 16))
    with pytest.raises(ValueError, match="caches make no stack"):
        BACKEND.decoder_stack(layers, [], rotation(16, 16), shape, LayerForm(EPS))
    with pytest.raises(ValueError, match="qkv is"):
        BACKEND.decoder_stack(
            layers, caches, rotation(16, 16), replace(shape, num_heads=8), LayerForm(EPS)
        )
    wrong = replace(layers[0], q_norm_D=torch.ones(8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="q_norm_D"):
        BACKEND.decoder_stack([wrong], caches, rotation(16, 16), shape, LayerForm(EPS))
    wider = make_layers(64, 128, shape, torch.bfloat16, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gate_up is 256 x 64, not 192 x 64"):
        BACKEND.decoder_stack(
            layers + wider, [*caches, *caches], rotation(16, 16), shape, LayerForm(EPS)
        )
