"""Mixture of experts (MoE) in PyTorch: the reference of the other backends."""

from __future__ import annotations

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


def moe(backend: Backend, x_TH: torch.Tensor, experts: Experts, form: LayerForm) -> torch.Tensor:
    """`Backend.moe`: tokens grouped by expert, one product per expert that has any. A token's
    expert outputs are added in expert order, whatever else is in the batch."""
    topk_weights_TK, topk_ids_TK = route(x_TH, experts)
    by_expert = topk_ids_TK.flatten().argsort(stable=True)
    counts = topk_ids_TK.flatten().bincount(minlength=len(experts.downs)).tolist()
    y_TH = torch.zeros_like(x_TH)
    for gate_up, down, assignments in zip(
        experts.gate_ups, experts.downs, torch.split(by_expert, counts), strict=True
    ):
        if len(assignments):
            rows = assignments // experts.experts_per_token
            given = down(backend.activate(gate_up(x_TH[rows]), form.activation, form.gated))
            given = given * topk_weights_TK.flatten()[assignments, None]
            y_TH.index_add_(0, rows, given.to(y_TH.dtype))
    return y_TH
