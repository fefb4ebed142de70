"""Rotation of heads in PyTorch, alone and of queries without keys."""

from __future__ import annotations

import torch

from kernels.interface import AttentionShape, Backend, Batch


def rotate(x_TND: torch.Tensor, cos_sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotate feature pairs (i, i + D/2) by the position's angles, in float32."""
    cos, sin = cos_sin_T1D.chunk(2, dim=-1)
    first, second = x_TND.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_TND.dtype)


def rotated_queries(
    backend: Backend,
    q_TX: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    batch: Batch,
    shape: AttentionShape,
    norm_D: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """`Backend.rope_and_cache` of queries alone: the backend's norm, and sums and products, which
    round alike in any batch."""

    def normed(x_TND: torch.Tensor) -> torch.Tensor:
        if norm_D is None:
            return x_TND
        x_XD = x_TND.reshape(-1, shape.head_dim).contiguous()
        return backend.rms_norm(x_XD, norm_D, eps).view(x_TND.shape)

    cos_sin_T1D = cos_sin_PD[batch.positions_T.long()].unsqueeze(1)
    q_TND = q_TX.view(-1, shape.num_heads, shape.head_dim)
    if shape.norms_last:
        return normed(rotate(q_TND, cos_sin_T1D))
    return rotate(normed(q_TND), cos_sin_T1D)
