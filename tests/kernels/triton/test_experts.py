"""Grouped experts: against float64 and against torch's generic path, alone as in any batch, split
over ranks, and without waiting for the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
from app.bench.gpu import checks
from app.bench.gpu.checks import ExpertCase
from app.bench.gpu.stored_case import StoredCase
from kernels.layer_form import LayerForm, Routing
from kernels.layer_weights import Experts, SharedExpert
from kernels.torch import moe as generic
from kernels.torch.backend import TorchBackend
from kernels.torch.linear import TorchLinear
from kernels.triton import experts as mixture
from kernels.triton.backend import TritonBackend
from kernels.triton.grouped import GroupedLayers, grouped
from kernels.triton.tiles import expert_tile
from tests.kernels.triton.interpreted import multiply_by_rows
from tests.kernels.triton.waits import Waited, refusing_waits

# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter's matrix product is wrong in bfloat16.
HALF = torch.bfloat16 if ON_GPU else torch.float16
BACKEND = TritonBackend()
SILU, CLAMPED = LayerForm(1e-5), LayerForm(1e-5, activation="clamped_swiglu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def case_id(case: ExpertCase) -> str:
    return case.name.replace(" ", "-")


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("case", checks.SMALL_EXPERTS, ids=case_id)
def test_against_float64(case: ExpertCase, dtype: torch.dtype) -> None:
    result = checks.check_experts(case, BACKEND, dtype, DEVICE)
    assert result.passed, result


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("tokens", "sizes", "form", "biased", "chosen"),
    [
        (1, (64, 8, 64, 32), CLAMPED, True, None),
        (37, (16, 4, 48, 96), SILU, False, None),
        (70, (4, 1, 64, 32), CLAMPED, True, 1),
    ],
)
def test_it_is_what_torch_computes(
    tokens: int,
    sizes: tuple[int, int, int, int],
    form: LayerForm,
    biased: bool,
    chosen: int | None,
    renormalize: bool,
) -> None:
    case = ExpertCase("", tokens, sizes, form, biased, chosen)
    x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    experts.renormalize = renormalize
    given = BACKEND.moe(x, experts, form)
    expected = TorchBackend().moe(x, experts, form)
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 37])
def test_scaled_inputs_are_what_torch_computes(tokens: int) -> None:
    case = ExpertCase("", tokens, (9, 2, 64, 32), SILU, False, None)
    x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    experts.scales_inputs = True
    experts.router = BACKEND.pack_linear(torch.randn(8, 64, device=DEVICE), None)
    given = BACKEND.moe(x, experts, SILU)
    expected = TorchBackend().moe(x, experts, SILU)
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 37])
def test_groups_and_a_shared_expert_are_what_torch_computes(tokens: int) -> None:
    """Nor does their choice wait for the device."""
    x, experts = checks.expert_inputs(
        ExpertCase("", tokens, (8, 2, 64, 32), SILU), BACKEND, torch.float32, DEVICE
    )
    gate_up, down, gate = (
        BACKEND.pack_linear(torch.randn(*size, device=DEVICE) / 8, None)
        for size in ((96, 64), (64, 48), (1, 64))
    )
    experts = replace(
        experts,
        routing=Routing(scores="sigmoid", num_groups=4, kept_groups=2, scale=2.5),
        correction_bias_E=torch.randn(8, device=DEVICE),
        shared=SharedExpert(gate_up, down, gate),
    )
    expected = TorchBackend().moe(x, experts, SILU)
    torch.testing.assert_close(without_waiting(experts, x), expected, rtol=1e-4, atol=1e-5)


def layers_of(experts: Experts) -> GroupedLayers:
    layers = grouped(experts)
    assert layers is not None
    return layers


@pytest.mark.parametrize(
    ("form", "stored", "dtype"),
    [
        (SILU, None, torch.float32),
        (CLAMPED, None, HALF),
        (SILU, StoredCase(4, 32, has_zeros=True), torch.float32),
        (SILU, StoredCase(4, 32, has_zeros=True), HALF),
    ],
    ids=["silu", "clamped", "int4", "int4-half"],
)
def test_a_token_has_the_same_bits_alone_and_in_any_batch(
    form: LayerForm, stored: StoredCase | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_by_rows(monkeypatch)
    tokens = expert_tile(dtype).rows + 6  # two blocks of the expert that every token has
    case = ExpertCase("", tokens, (6, 3, 96, 72), form, True, 3, stored)
    x, experts = checks.expert_inputs(case, BACKEND, dtype, DEVICE)
    layers = layers_of(experts)
    weights, ids = generic.route(x, experts)
    together = mixture.routed(x, weights, ids, layers, form)
    for t in (0, 1, tokens - 1):
        alone = mixture.routed(x[t : t + 1], weights[t : t + 1], ids[t : t + 1], layers, form)
        assert torch.equal(alone[0], together[t])
    order = torch.randperm(tokens, device=DEVICE)
    shuffled = mixture.routed(x[order], weights[order], ids[order], layers, form)
    assert torch.equal(shuffled, together[order])
    # Other neighbors: of other values, of no number, and of other experts.
    x[1:], ids[1:] = torch.inf, ids[1:] + 3
    assert torch.equal(mixture.routed(x, weights, ids, layers, form)[0], together[0])


def test_a_token_that_is_no_number_stays_none() -> None:
    """Its logits then fail the step; a clamp would have hidden it."""
    for form in (SILU, CLAMPED, LayerForm(1e-5, activation="relu2", gated=False)):
        case = ExpertCase("", 3, (4, 2, 64, 32), form)
        x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
        weights, ids = generic.route(x, experts)
        x[1] = torch.nan
        out = mixture.routed(x, weights, ids, layers_of(experts), form)
        assert out.isnan().all(1).tolist() == [False, True, False]
        assert not out[[0, 2]].isnan().any()


def shard(experts: Experts, inner: int, rank: int, num_ranks: int, gated: bool) -> Experts:
    """A rank's part of every expert, as weights/load.py cuts it: the bias of down on rank 0."""
    part = slice(rank * inner // num_ranks, (rank + 1) * inner // num_ranks)

    def rows(whole: torch.Tensor) -> torch.Tensor:
        return torch.cat([half[part] for half in whole.split(inner)])

    def bias(linear: TorchLinear) -> torch.Tensor | None:
        return None if linear.bias_O is None else rows(linear.bias_O)

    gate_ups = [BACKEND.pack_linear(rows(x.weight_OK), bias(x)) for x in experts.gate_ups]
    downs = [
        BACKEND.pack_linear(x.weight_OK[:, part], x.bias_O if rank == 0 else None)
        for x in experts.downs
    ]
    return replace(experts, gate_ups=gate_ups, downs=downs)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("biased", [True, False])
def test_the_parts_of_ranks_sum_to_the_whole(num_ranks: int, biased: bool) -> None:
    inner = 50  # no rank's part is a whole number of tiles or of 16 bytes
    case = ExpertCase("", 33, (6, 2, 64, inner), CLAMPED, biased)
    x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    parts = [
        BACKEND.moe(x, shard(experts, inner, rank, num_ranks, gated=True), CLAMPED)
        for rank in range(num_ranks)
    ]
    expected = TorchBackend().moe(x, experts, CLAMPED)
    torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)


def without_waiting(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    with refusing_waits():
        return BACKEND.moe(x, experts, SILU)


def test_nothing_waits_for_the_device() -> None:
    case = ExpertCase("", 5, (4, 2, 64, 32), SILU)
    x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    assert torch.equal(without_waiting(experts, x), BACKEND.moe(x, experts, SILU))


@pytest.mark.parametrize(
    "wait",
    [
        lambda ids: ids.max().item(),
        lambda ids: ids.tolist(),
        lambda ids: ids.nonzero(),
        lambda ids: bool(ids.any()),
        lambda ids: ids[ids > 0],
        lambda ids: ids.flatten().bincount(minlength=4),
        lambda ids: ids.cpu(),
    ],
    ids=["item", "tolist", "nonzero", "bool", "mask", "bincount", "cpu"],
)
def test_a_wait_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, wait: Callable[[torch.Tensor], object]
) -> None:
    case = ExpertCase("", 5, (4, 2, 64, 32), SILU)
    x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    sort = mixture.sort_by_expert

    def waiting_sort(topk_ids_TK: torch.Tensor, *rest: int) -> object:
        wait(topk_ids_TK)
        return sort(topk_ids_TK, *rest)

    monkeypatch.setattr(mixture, "sort_by_expert", waiting_sort)
    with pytest.raises(Waited):
        without_waiting(experts, x)


def test_torch_waits_for_its_counts() -> None:
    case = ExpertCase("", 5, (4, 2, 64, 32), SILU)
    x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    with pytest.raises(Waited), refusing_waits():
        TorchBackend().moe(x, experts, SILU)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_experts_quantized_at_load_are_grouped(kind: str) -> None:
    case = ExpertCase("", 5, (4, 2, 64, 32), SILU)
    x, dense = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    downs = [BACKEND.pack_linear(linear.weight_OK, None, kind) for linear in dense.downs]
    experts = replace(dense, downs=downs)
    support = BACKEND.graph_support()
    assert support is not None
    assert support.holds_experts(experts)
    expected = generic.moe(BACKEND, x, experts, SILU)
    torch.testing.assert_close(without_waiting(experts, x), expected, rtol=1e-4, atol=1e-5)


def test_experts_in_act_order_take_the_generic_path_and_no_graph() -> None:
    stored = StoredCase(4, 32, has_zeros=True, act_order=True)
    case = ExpertCase("", 5, (4, 2, 64, 32), SILU, stored=stored)
    x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    support = BACKEND.graph_support()
    assert support is not None
    assert not support.holds_experts(experts)
    assert torch.equal(BACKEND.moe(x, experts, SILU), generic.moe(BACKEND, x, experts, SILU))
    with pytest.raises(Waited):
        without_waiting(experts, x)


def test_no_tokens_are_no_work() -> None:
    case = ExpertCase("", 2, (4, 2, 64, 32), SILU)
    x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    assert BACKEND.moe(x[:0], experts, SILU).shape == (0, 64)


def test_what_does_not_fit_is_refused() -> None:
    case = ExpertCase("", 2, (4, 2, 64, 32), SILU)
    x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    with pytest.raises(ValueError, match=r"x is \(2, 32\)"):
        BACKEND.moe(x[:, :32], experts, SILU)
    with pytest.raises(ValueError, match=r"x is \(2, 64\) torch.float16"):
        BACKEND.moe(x.half(), experts, SILU)
    with pytest.raises(ValueError, match="gate and up are"):
        BACKEND.moe(x, replace(experts, gate_ups=experts.downs), SILU)
    other = [BACKEND.pack_linear(torch.zeros(64, 48, device=DEVICE), None), *experts.downs[1:]]
    with pytest.raises(ValueError, match="experts of one layer differ"):
        BACKEND.moe(x, replace(experts, downs=other), SILU)
