"""Routing: choices, weights and groups of every token as its definition in plain numbers says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernels.layer_form import BY_SOFTMAX, LayerForm, Routing
from kernels.layer_weights import Experts, SharedExpert
from kernels.torch import moe
from kernels.torch.backend import TorchBackend

BACKEND, FORM = TorchBackend(), LayerForm(1e-5)
HIDDEN, NUM_EXPERTS, PER_TOKEN = 24, 12, 3
SIGMOID = Routing(scores="sigmoid")
ROUTINGS = {
    "softmax": BY_SOFTMAX,
    "sigmoid": SIGMOID,
    "scaled": replace(SIGMOID, scale=2.5),
    "groups by the sum of two": replace(SIGMOID, num_groups=4, kept_groups=2),
    "groups by the best": Routing(num_groups=3, kept_groups=1, best_of_group=1),
    "sums of at least 2": replace(SIGMOID, least_sum=2.0),
}


def make(routing: Routing, renormalize: bool = True, biased: bool = True) -> Experts:
    def linear(out_features: int, in_features: int):  # type: ignore[no-untyped-def]
        weight_OK = torch.randn(out_features, in_features) * in_features**-0.5
        return BACKEND.pack_linear(weight_OK, None)

    router = linear(NUM_EXPERTS, HIDDEN)
    gate_ups = [linear(32, HIDDEN) for _ in range(NUM_EXPERTS)]
    downs = [linear(HIDDEN, 16) for _ in range(NUM_EXPERTS)]
    bias_E = torch.randn(NUM_EXPERTS) / 4 if biased else None
    shared = SharedExpert(linear(80, HIDDEN), linear(HIDDEN, 40), linear(1, HIDDEN))
    return Experts(
        router, gate_ups, downs, PER_TOKEN, renormalize, routing=routing,
        correction_bias_E=bias_E, shared=shared,
    )  # fmt: skip


def by_definition(logits: list[float], experts: Experts) -> dict[int, float]:
    """The weights of one token by expert."""
    routing, bias_E = experts.routing, experts.correction_bias_E
    if routing.scores == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        total = sum(map(math.exp, logits))
        scores = [math.exp(logit) / total for logit in logits]
    biases = [0.0] * len(scores) if bias_E is None else bias_E.tolist()
    choice = [score + bias for score, bias in zip(scores, biases, strict=True)]
    size = len(scores) // routing.num_groups
    groups = [range(first, first + size) for first in range(0, len(scores), size)]

    def worth(group: range) -> float:
        return sum(sorted((choice[e] for e in group), reverse=True)[: routing.best_of_group])

    kept = sorted(groups, key=worth, reverse=True)[: routing.kept_groups]
    allowed = [expert for group in kept for expert in group]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[:PER_TOKEN]
    total = max(sum(scores[e] for e in chosen), routing.least_sum) if experts.renormalize else 1
    return {e: routing.scale * scores[e] / total for e in chosen}


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_token_has_the_experts_and_weights_of_the_definition(
    name: str, renormalize: bool, biased: bool
) -> None:
    torch.manual_seed(0)
    experts = make(ROUTINGS[name], renormalize, biased)
    x_TH = 2 * torch.randn(50, HIDDEN)
    weights_TK, ids_TK = moe.route(x_TH, experts)
    logits_TE = experts.router(x_TH)
    for logits, weights, ids in zip(logits_TE, weights_TK, ids_TK, strict=True):
        found = dict(zip(ids.tolist(), weights.tolist(), strict=True))
        assert found == pytest.approx(by_definition(logits.tolist(), experts), rel=1e-5)


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_token_is_routed_alone_as_in_any_batch(name: str) -> None:
    """41 tokens: their scores end within a vector of the processor."""
    torch.manual_seed(0)
    experts = make(ROUTINGS[name])
    experts.router = BACKEND.pack_linear(torch.eye(NUM_EXPERTS), None)  # exact in any batch
    x_TE = torch.randn(41, NUM_EXPERTS)
    weights_TK, ids_TK = moe.route(x_TE, experts)
    for t in range(len(x_TE)):
        alone = moe.route(x_TE[t : t + 1], experts)
        assert torch.equal(alone[0], weights_TK[t : t + 1])
        assert torch.equal(alone[1], ids_TK[t : t + 1])


@pytest.mark.parametrize("gated", [True, False])
def test_a_shared_expert_is_an_mlp_of_every_token(gated: bool) -> None:
    torch.manual_seed(0)
    experts = make(SIGMOID)
    shared = experts.shared
    assert shared is not None
    assert shared.gate is not None
    x_TH = torch.randn(9, HIDDEN)
    scale_T1 = shared.gate(x_TH).sigmoid() if gated else torch.ones(9, 1)
    given_TH = shared.down(BACKEND.activate(shared.gate_up(x_TH), "silu", gated=True))
    routed_TH = BACKEND.moe(x_TH, replace(experts, shared=None), FORM)
    if not gated:
        experts.shared = replace(shared, gate=None)
    found_TH = BACKEND.moe(x_TH, experts, FORM)
    torch.testing.assert_close(found_TH, routed_TH + scale_T1 * given_TH)
