"""Mixture of experts (MoE) in PyTorch: the reference of the other backends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.interface import Backend
from kernels.layer_form import LayerForm
from kernels.layer_weights import Experts


def route(x_TH: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Select each token's K experts: (topk_weights_TK float32, topk_ids_TK)."""
    probs_TE = experts.router.forward_f32(x_TH).float().softmax(-1)
    topk_weights_TK, topk_ids_TK = probs_TE.topk(experts.experts_per_token, dim=-1)
    if experts.renormalize:
        topk_weights_TK = topk_weights_TK / topk_weights_TK.sum(-1, keepdim=True)
    return topk_weights_TK, topk_ids_TK


# (x_XH, weights_XK, ids_XK) -> (X, H): each row's experts, summed by weight.
Weighted = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mixed(x_TH: torch.Tensor, experts: Experts, weighted: Weighted) -> torch.Tensor:
    """Route, and `weighted` over the tokens. Where inputs are scaled, each pair of token and expert
    is a row of its own, of weight 1."""
    if not experts.scales_inputs:
        return weighted(x_TH, *route(x_TH, experts))
    logits_TK, ids_TK = (
        experts.router.forward_f32(x_TH).float().topk(experts.experts_per_token, dim=-1)
    )
    # The sigmoid, as a softmax beside 0: torch's own rounds the last elements of a tensor otherwise
    # than those before, so that a token's bits would depend on the batch.
    pairs_TK2 = torch.stack((logits_TK, torch.zeros_like(logits_TK)), -1)
    scales_TK = pairs_TK2.softmax(-1)[..., 0].to(x_TH.dtype)
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

    return mixed(x_TH, experts, weighted)


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
