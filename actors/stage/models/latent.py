"""Latent attention as attention with one key/value head, between the layer's projections
(`kernels.layer_weights.LatentWeights`)."""

from __future__ import annotations

import torch

from kernels.interface import AttentionShape, Backend
from kernels.layer_weights import LatentWeights


def latent_qkv(w: LatentWeights, down_TX: torch.Tensor, backend: Backend) -> torch.Tensor:
    """The layer's projection -> q, k and v as `Backend.rope_and_cache` takes them, D features each.

    The value is the latent, in the order of the key, with zeros in the place of the rotated part.
    """
    num_tokens = len(down_TX)
    query_TK, latent_TC, rotated_TF = torch.split(down_TX, [*w.widths], dim=1)
    if w.query_up is not None and w.query_norm_K is not None:
        query_TK = w.query_up(backend.rms_norm(query_TK.contiguous(), w.query_norm_K, w.eps))
    normed_TC = backend.rms_norm(latent_TC.contiguous(), w.norm_C, w.eps)
    q_TND = w.queries(query_TK.reshape(num_tokens, -1, w.query_dim))
    key_TD = torch.cat((rotated_TF, normed_TC), dim=1)
    value_TD = torch.cat((torch.zeros_like(rotated_TF), normed_TC), dim=1)
    k_TD, v_TD = key_TD[:, w.order_D], value_TD[:, w.order_D]
    return torch.cat((q_TND.view(num_tokens, -1), k_TD, v_TD), dim=1)


def latent_values(
    w: LatentWeights, attended_TX: torch.Tensor, shape: AttentionShape
) -> torch.Tensor:
    """Sums of the cache's values by head, (T, N * D) -> the heads' results, side by side."""
    attended_TND = attended_TX.view(-1, shape.num_heads, shape.head_dim)
    return w.values(attended_TND).flatten(1)
