"""Rows of tables by token, of which each rank holds those of its part of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from actors.transport.group import RankGroup
from kernels.interface import Backend
from kernels.layer_weights import Linear


def look_up(
    tokens_T: torch.Tensor, table_VX: torch.Tensor, vocab_start: int, group: RankGroup
) -> torch.Tensor:
    """(T, X): the sum over ranks, each looking up its part, which begins at vocab_start."""
    if group.size == 1:
        return functional.embedding(tokens_T, table_VX)
    local_T = tokens_T - vocab_start
    foreign_T = (local_T < 0) | (local_T >= table_VX.shape[0])
    x_TX = functional.embedding(local_T.masked_fill(foreign_T, 0), table_VX)
    return group.all_reduce(x_TX.masked_fill(foreign_T[:, None], 0.0))


@dataclass(slots=True)
class LayerInputs:
    """Inputs of all L layers (Gemma 4), P numbers of a token each: the sum of a row of a table and
    of a projection of the embedding, over the square root of two.

    table_VX: this rank's rows, as of the embedding. scale: of the table. projection: of the
    embedding, whole on every rank; projection_scale: of its result, which is normed layer by layer.
    """

    table_VX: torch.Tensor
    scale: float
    projection: Linear
    projection_scale: float
    norm_P: torch.Tensor
    vocab_start: int

    def join(
        self,
        tokens_T: torch.Tensor,
        x_TH: torch.Tensor,
        group: RankGroup,
        backend: Backend,
        eps: float,
    ) -> torch.Tensor:
        """The embedding with the layers' inputs beside it -> (T, H + L P)."""
        projected_TX = self.projection(x_TH) * self.projection_scale
        normed_XP = backend.rms_norm(projected_TX.view(-1, len(self.norm_P)), self.norm_P, eps)
        rows_TX = look_up(tokens_T, self.table_VX, self.vocab_start, group) * self.scale
        inputs_TX = (normed_XP.view(rows_TX.shape) + rows_TX) * 2.0**-0.5
        return torch.cat((x_TH, inputs_TX), dim=1)
