"""Sampling with a vocabulary-parallel head: every rank takes the Gumbel argmax of its shard, and
ranks exchange these, a few bytes per token, instead of logits.

That suffices for greedy decoding and for temperature alone. Parameters that need the whole
distribution or change logits (top_k, top_p, min_p, log-probabilities, penalties, biases, grammars,
min_tokens) have the logits of their rows gathered on rank 0.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from actors.stage.input_batch import InputBatch
from actors.stage.models.decoder import Decoder
from actors.transport.group import RankGroup
from kernels.interface import Backend


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
        """The token of each draw, known to every rank; -1 in all of them where one of the winning
        logits is not finite. sharded_SV: what the head made of them here."""
        logits_SV, first_id = self._decoder.local_logits(sharded_SV)
        rows = self._input_batch.columns.draws(rows_S, positions_S)
        best_S2 = np.zeros((len(rows_S), 2))
        if logits_SV.shape[1]:
            best_S2[:, 0], best_S2[:, 1] = self._backend.gumbel_argmax(logits_SV, rows, first_id)
        else:
            best_S2[:, 0] = -np.inf  # this rank's shard is padding only
        mine_S2 = torch.from_numpy(best_S2).to(self._decoder.device)
        scores_NS, tokens_NS = self._group.gather_all(mine_S2).cpu().numpy().transpose(2, 0, 1)
        # A shard that is not finite cannot lose: its score is the maximum, or NaN.
        if not np.isfinite(scores_NS.max(axis=0)).all():
            return np.full(len(rows_S), -1, np.int64)
        won_S = scores_NS.argmax(axis=0)  # the first rank among equals, which has the lower ids
        drawn_S: NDArray[np.int64] = tokens_NS[won_S, np.arange(len(rows_S))].astype(np.int64)
        return drawn_S
