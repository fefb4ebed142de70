"""The mixture in C++ gives the bits that the operations give one by one, whatever the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cpu import library
from kernels.torch import moe

if library.load() is None:
    pytest.skip("the CPU library is not built here", allow_module_level=True)

from kernels.cpu.backend import CpuBackend
from kernels.layer_form import LayerForm, Routing
from kernels.layer_weights import Experts, SharedExpert
from kernels.torch.backend import TorchBackend
from tests.kernels.cpu.batches import SETS, instruction_set, threads

BACKEND = CpuBackend()
HIDDEN = 96
FORMS = [
    LayerForm(1e-5),
    LayerForm(1e-5, activation="gelu", gated=False),
    LayerForm(1e-5, activation="clamped_swiglu"),
]
# inner size, bias, quantization, type; gate and up of 40 cannot be fused
MODELS = {
    "bfloat16": (64, False, "none", torch.bfloat16),
    "float32": (40, True, "none", torch.float32),
    "float16": (64, True, "none", torch.float16),
    "int8": (64, False, "int8", torch.bfloat16),
    "w8a8": (64, False, "w8a8", torch.bfloat16),
}


@pytest.fixture(params=SETS, ids=lambda isa: isa.name.lower(), autouse=True)
def _isa(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    with instruction_set(request.param):
        yield


def make(model: str, form: LayerForm, normalized: bool = True) -> Experts:
    inner, biased, quantization, dtype = MODELS[model]

    def linear(out_features: int, in_features: int):  # type: ignore[no-untyped-def]
        weight = (torch.randn(out_features, in_features) * in_features**-0.5).to(dtype)
        bias = torch.randn(out_features).to(dtype) if biased else None
        return BACKEND.pack_linear(weight, bias, quantization)

    wide = 2 * inner if form.gated else inner
    router = BACKEND.pack_linear(torch.randn(7, HIDDEN).to(dtype), None)
    gate_ups = [linear(wide, HIDDEN) for _ in range(7)]
    return Experts(router, gate_ups, [linear(HIDDEN, inner) for _ in range(7)], 3, normalized)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.activation)
@pytest.mark.parametrize("model", MODELS)
def test_one_call_is_the_operations_one_by_one(model: str, form: LayerForm) -> None:
    experts = make(model, form, normalized=model != "int8")
    x = torch.randn(130, HIDDEN).to(MODELS[model][3])
    with threads(2):
        got = BACKEND.moe(x, experts, form)
    with threads(1):
        expected = moe.moe(BACKEND, x, experts, form)
        alone = torch.cat([BACKEND.moe(row, experts, form) for row in x.split(1)])
        assert torch.equal(got, expected)
        assert torch.equal(got, alone)
        assert BACKEND.moe(x[:0], experts, form).shape == (0, HIDDEN)


def test_it_is_what_torch_computes() -> None:
    form, plain = FORMS[0], TorchBackend()
    weights = [torch.randn(*size) / 8 for size in ((7, HIDDEN), (128, HIDDEN), (HIDDEN, 64))]
    found = []
    for backend in (BACKEND, plain):
        router, gate_up, down = (backend.pack_linear(weight.clone(), None) for weight in weights)
        experts = Experts(router, [gate_up] * 7, [down] * 7, 2, True)
        found.append(backend.moe(torch.linspace(-1, 1, 5 * HIDDEN).view(5, -1), experts, form))
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_scaled_inputs_and_an_expert_of_all_tokens(model: str) -> None:
    """As each token's experts one by one give; a token has the same bits alone."""
    experts, form = replace(make(model, FORMS[0]), scales_inputs=True), FORMS[0]
    router_EH = torch.randn(6, HIDDEN) / 10  # scales far from 1
    experts.router = BACKEND.pack_linear(router_EH.to(MODELS[model][3]), None)
    x = torch.randn(40, HIDDEN).to(MODELS[model][3])  # more scales than vectors hold
    got = BACKEND.moe(x, experts, form)
    assert torch.equal(got, moe.moe(BACKEND, x, experts, form))
    for row, found in zip(x.split(1), got.split(1), strict=True):
        assert torch.equal(BACKEND.moe(row, experts, form), found)
        logits, ids = experts.router.forward_f32(row).float()[0].topk(3)
        inputs = [*(row * scale for scale in logits.sigmoid().to(row.dtype)), row]
        expected = sum(
            experts.downs[expert](
                BACKEND.activate(experts.gate_ups[expert](given), "silu", gated=True)
            ).float()
            for expert, given in zip([*ids.tolist(), 6], inputs, strict=True)
        )
        tolerance = 1e-5 if model == "float32" else 2e-2
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    assert BACKEND.moe(x[:0], experts, form).shape == (0, HIDDEN)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_routing_by_groups_and_a_shared_expert(model: str, wide: bool) -> None:
    """As the operations one by one give; a token has the same bits alone."""
    experts, form, dtype = make(model, FORMS[0]), FORMS[0], MODELS[model][3]
    routing = Routing(scores="sigmoid", num_groups=2, kept_groups=1, scale=2.5)
    experts.router = BACKEND.pack_linear(torch.randn(6, HIDDEN).to(dtype), None)
    gate_up, down, gate = (
        BACKEND.pack_linear((torch.randn(*size) / 8).to(dtype), None)
        for size in ((160, HIDDEN), (HIDDEN, 80), (1, HIDDEN))
    )
    experts = replace(
        experts,
        routing=routing,
        correction_bias_E=torch.randn(6),
        shared=SharedExpert(gate_up, down, gate),
    )
    if wide:
        router_EH = torch.randn(6, HIDDEN)
        experts = replace(experts, router=BACKEND.pack_linear(router_EH, None), wide_router=True)
    x = torch.randn(41, HIDDEN).to(dtype)
    got = BACKEND.moe(x, experts, form)
    assert torch.equal(got, moe.moe(BACKEND, x, experts, form))
    alone = torch.cat([BACKEND.moe(row, experts, form) for row in x.split(1)])
    assert torch.equal(got, alone)
    assert BACKEND.moe(x[:0], experts, form).shape == (0, HIDDEN)


def test_what_does_not_fit_is_refused() -> None:
    experts = make("bfloat16", FORMS[0])
    with pytest.raises(ValueError, match="x is"):
        BACKEND.moe(torch.zeros(2, 64).bfloat16(), experts, FORMS[0])
    with pytest.raises(ValueError, match="x is"):
        BACKEND.moe(torch.zeros(2, HIDDEN), experts, FORMS[0])
    wrong = Experts(experts.router, experts.downs, experts.downs, 3, True)
    with pytest.raises(ValueError, match=r"an expert's layer is \(64, 96\)"):
        BACKEND.moe(torch.zeros(2, HIDDEN).bfloat16(), wrong, FORMS[0])
    other = TorchBackend().pack_linear(torch.zeros(HIDDEN, 64), None)
    with pytest.raises(TypeError, match="TorchLinear"):
        BACKEND.moe(
            torch.zeros(2, HIDDEN).bfloat16(), replace(experts, downs=[other] * 7), FORMS[0]
        )
