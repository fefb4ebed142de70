"""Mixture of experts (MoE) in PyTorch: the reference of the other backends, which route by it.

Suffixes beside those of `kernels.interface`: E experts, here also G groups of M experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.interface import Backend
from kernels.layer_form import LayerForm, Routing
from kernels.layer_weights import Experts, SharedExpert


def route(x_TH: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Select each token's K experts: (topk_weights_TK float32, topk_ids_TK)."""
    routing, bias_E = experts.routing, experts.correction_bias_E
    router_input_TH = x_TH.float() if experts.wide_router else x_TH
    logits_TE = experts.router.forward_f32(router_input_TH).float()
    scores_TE = sigmoid(logits_TE) if routing.scores == "sigmoid" else logits_TE.softmax(-1)
    chosen_by_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if routing.kept_groups < routing.num_groups:
        chosen_by_TE = _of_kept_groups(chosen_by_TE, routing)
    topk_weights_TK, topk_ids_TK = chosen_by_TE.topk(experts.experts_per_token, dim=-1)
    if bias_E is not None:
        topk_weights_TK = scores_TE.gather(1, topk_ids_TK)
    if experts.renormalize:
        sums_T1 = topk_weights_TK.sum(-1, keepdim=True)
        if routing.least_sum:
            sums_T1 = sums_T1.clamp(min=routing.least_sum)
        topk_weights_TK = topk_weights_TK / sums_T1
    if routing.scale != 1.0:
        topk_weights_TK = topk_weights_TK * routing.scale
    if experts.scales_E is not None:
        topk_weights_TK = topk_weights_TK * experts.scales_E[topk_ids_TK]
    return topk_weights_TK, topk_ids_TK


def _of_kept_groups(scores_TE: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The scores, minus infinity outside the best groups."""
    T, E = scores_TE.shape
    grouped_TGM = scores_TE.view(T, routing.num_groups, E // routing.num_groups)
    scores_TG = grouped_TGM.topk(routing.best_of_group, dim=-1).values.sum(-1)
    kept_TG = torch.zeros_like(scores_TG, dtype=torch.bool)
    kept_TG.scatter_(1, scores_TG.topk(routing.kept_groups, dim=-1).indices, True)
    return grouped_TGM.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1)


def sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """A softmax beside 0: torch's own rounds the last elements of a tensor otherwise than those
    before, so that a token's bits would depend on the batch."""
    return torch.stack((logits, torch.zeros_like(logits)), -1).softmax(-1)[..., 0]


# (x_XH, weights_XK, ids_XK) -> (X, H): each row's experts, summed by weight.
Weighted = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mixed(
    backend: Backend, x_TH: torch.Tensor, experts: Experts, form: LayerForm, weighted: Weighted
) -> torch.Tensor:
    """Route, and `weighted` over the tokens; then the shared expert. Where inputs are scaled, each
    pair of token and expert is a row of its own, of weight 1."""
    if not experts.scales_inputs:
        norms = (experts.router_norm_H, experts.input_norm_H)
        routed_TH, x_TH = (
            x_TH if norm_H is None else backend.rms_norm(x_TH, norm_H, form.eps) for norm_H in norms
        )
        y_TH = weighted(x_TH, *route(routed_TH, experts))
        if experts.shared is not None:
            y_TH += _shared(backend, x_TH, experts.shared, form)
        return y_TH
    logits_TK, ids_TK = (
        experts.router.forward_f32(x_TH).float().topk(experts.experts_per_token, dim=-1)
    )
    scales_TK = sigmoid(logits_TK).to(x_TH.dtype)
    routed_TKH = x_TH[:, None] * scales_TK[..., None]
    x_XH = torch.cat((routed_TKH, x_TH[:, None]), 1).flatten(0, 1)
    last_T1 = ids_TK.new_full((len(x_TH), 1), len(experts.downs) - 1)
    ids_X1 = torch.cat((ids_TK, last_T1), 1).view(-1, 1)
    y_XH = weighted(x_XH, torch.ones_like(ids_X1, dtype=torch.float32), ids_X1)
    return y_XH.view(len(x_TH), experts.experts_per_token + 1, y_XH.shape[-1]).sum(1)


def moe(backend: Backend, x_TH: torch.Tensor, experts: Experts, form: LayerForm) -> torch.Tensor:
    """`Backend.moe`: tokens grouped by expert, one product per expert that has any. A token's
    expert outputs are added in expert order, whatever else is in the batch."""

    def weighted(
        x_XH: torch.Tensor, weights_XK: torch.Tensor, ids_XK: torch.Tensor
    ) -> torch.Tensor:
        return _weighted(backend, x_XH, weights_XK, ids_XK, experts, form)

    return mixed(backend, x_TH, experts, form, weighted)


def _shared(
    backend: Backend, x_TH: torch.Tensor, shared: SharedExpert, form: LayerForm
) -> torch.Tensor:
    inner_TI = backend.activate(shared.gate_up(x_TH), form.activation, form.gated)
    y_TH = shared.down(inner_TI)
    if shared.gate is not None:
        y_TH *= sigmoid(shared.gate.forward_f32(x_TH).float()).to(y_TH.dtype)
    return y_TH


def _weighted(
    backend: Backend,
    x_TH: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    experts: Experts,
    form: LayerForm,
) -> torch.Tensor:
    by_expert = topk_ids_TK.flatten().argsort(stable=True)
    counts = topk_ids_TK.flatten().bincount(minlength=len(experts.downs)).tolist()
    y_TH = torch.zeros_like(x_TH)
    for gate_up, down, assignments in zip(
        experts.gate_ups, experts.downs, torch.split(by_expert, counts), strict=True
    ):
        if len(assignments):
            rows = assignments // topk_ids_TK.shape[1]
            given = down(backend.activate(gate_up(x_TH[rows]), form.activation, form.gated))
            given = given * topk_weights_TK.flatten()[assignments, None]
            y_TH.index_add_(0, rows, given.to(y_TH.dtype))
    return y_TH
