"""Embeddings: the mean or the last of a prompt's final hidden states, gathered over chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actors.scheduling.plan import Slice

POOLINGS = ("mean", "last")


@dataclass(slots=True)
class _Partial:
    """The running sum where the latest chunk starts and where it ends."""

    start: int
    sum_at_start_H: torch.Tensor
    end: int
    sum_at_end_H: torch.Tensor


class Pools:
    """Running means by request. A repeated chunk adds itself once."""

    def __init__(self) -> None:
        self._partials: dict[int, _Partial] = {}

    def mean(self, piece: Slice, normed_RH: torch.Tensor) -> torch.Tensor:
        """The mean from the first token to the end of this chunk, float32.

        Raises ValueError where tokens before the chunk were never seen (a cached prefix).
        """
        sum_H = normed_RH.float().sum(0)
        partial = self._partials.get(piece.request_id)
        if piece.start == 0:
            before_H = torch.zeros_like(sum_H)
        elif partial is not None and partial.end == piece.start:
            before_H = partial.sum_at_end_H
        elif partial is not None and partial.start == piece.start:
            before_H = partial.sum_at_start_H
        else:
            raise ValueError(
                f"mean pooling of request {piece.request_id} needs its tokens from the first on"
            )
        end = piece.start + piece.num_tokens
        total_H = before_H + sum_H
        self._partials[piece.request_id] = _Partial(piece.start, before_H, end, total_H)
        return total_H / end

    def release(self, request_id: int) -> None:
        self._partials.pop(request_id, None)

    def clear(self) -> None:
        self._partials.clear()
