"""Sampling with a vocabulary-parallel head: every rank takes the Gumbel argmax of its shard, and
ranks exchange these, a few bytes per token, instead of logits.

That suffices for greedy decoding and for temperature alone. Parameters that need the whole
distribution or change logits (top_k, top_p, min_p, log-probabilities, penalties, biases, grammars,
min_tokens) have the logits of their rows gathered on rank 0.

Shape suffixes: S draws, N ranks, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from actors.stage.input_batch import InputBatch
from actors.stage.models.decoder import Decoder
from actors.transport.group import RankGroup
from kernels.interface import Backend

NO_SCORE = float(np.finfo(np.float64).min)  # of a shard that is padding only

DRAW_FAILED = -2  # what rank 0 shares in the place of tokens; -1 is `NOT_FINITE`


class VocabParallelSampler:
    """On every rank of the last stage; all of them call `draw` together."""

    def __init__(
        self, decoder: Decoder, backend: Backend, input_batch: InputBatch, group: RankGroup
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._input_batch = input_batch
        self._group = group

    def draw(
        self, rows_S: NDArray[np.intp], positions_S: NDArray[np.int64], sharded_SV: torch.Tensor
    ) -> NDArray[np.int64]:
        """The token of each draw, known to every rank; -1 where it is not finite. sharded_SV: what
        the head made of them here."""
        logits_SV, first_id = self._decoder.local_logits(sharded_SV)
        rows = self._input_batch.columns.draws(rows_S, positions_S)
        scores_S, tokens_S = np.full(len(rows_S), NO_SCORE), np.zeros(len(rows_S), np.int64)
        if logits_SV.shape[1]:
            scores_S, tokens_S = self._backend.gumbel_argmax(logits_SV, rows, first_id)
        device = self._decoder.device
        drawn_S = winners(
            self._group,
            torch.from_numpy(scores_S).to(device),
            torch.from_numpy(tokens_S).to(device),
        )
        drawn: NDArray[np.int64] = drawn_S.cpu().numpy().astype(np.int64)
        return drawn


def winners(group: RankGroup, scores_S: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
    """int32 tokens of the highest float64 scores over all ranks, the first rank's among equals
    (it has the lower ids); -1 where a rank's score is not finite. Every rank calls this with the
    best of its shard, and has all of the answer on its device; no synchronization.

    A shard of which nothing is finite must not lose, whatever its kernel made of NaN (-inf, where
    that is no number's maximum): its score becomes NaN, which argmax takes for the highest.
    """
    scores_S = scores_S.masked_fill(~torch.isfinite(scores_S), torch.nan)
    best_S2 = torch.stack((scores_S, tokens_S.double()), 1)  # one exchange; ids are exact
    scores_NS, tokens_NS = group.gather_all(best_S2).unbind(2)
    won_1S = scores_NS.argmax(0, keepdim=True)
    tokens_S = tokens_NS.gather(0, won_1S)[0].int()
    is_finite_S = torch.isfinite(scores_NS.gather(0, won_1S)[0])
    return tokens_S.masked_fill(~is_finite_S, -1)
