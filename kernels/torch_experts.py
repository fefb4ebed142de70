"""A mixture of experts in PyTorch: what other backends' are held against."""

from __future__ import annotations

import torch

from kernels.interface import Backend
from kernels.layer_form import LayerForm
from kernels.layer_weights import Experts


def route(x_TH: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's K experts: shares_TK, float32, and their numbers, chosen_TK."""
    shares_TE = experts.router.unrounded(x_TH).float().softmax(-1)
    shares_TK, chosen_TK = shares_TE.topk(experts.per_token, dim=-1)
    if experts.normalized:
        shares_TK = shares_TK / shares_TK.sum(-1, keepdim=True)
    return shares_TK, chosen_TK


def mixture(
    backend: Backend, x_TH: torch.Tensor, experts: Experts, form: LayerForm
) -> torch.Tensor:
    """Tokens grouped by expert, one product per expert that has some. Each token's results are
    added in the order of the experts, whatever else is in the batch."""
    shares_TK, chosen_TK = route(x_TH, experts)
    by_expert = chosen_TK.flatten().argsort(stable=True)
    counts = chosen_TK.flatten().bincount(minlength=len(experts.downs)).tolist()
    y_TH = torch.zeros_like(x_TH)
    for gate_up, down, places in zip(
        experts.gate_ups, experts.downs, torch.split(by_expert, counts), strict=True
    ):
        if len(places):
            rows = places // experts.per_token
            given = down(backend.activate(gate_up(x_TH[rows]), form.activation, form.gated))
            given = given * shares_TK.flatten()[places, None]
            y_TH.index_add_(0, rows, given.to(y_TH.dtype))
    return y_TH
