"""Draws in a captured step: inside the graph for every row, and after it for rows that need more.

One rank draws from whole logits. Several ranks each take the Gumbel argmax of their shard and
exchange these inside the graph, and every rank finds the winners on its own device
(`vocab_parallel.winners`), where its next step reads them. Rows that this does not suffice for are
drawn after the graph: rank 0 gathers their logits, draws, and broadcasts their tokens. All ranks
queue the same operations in the same order, and none waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from actors.stage.landing import Landing, TokenLanding
from actors.stage.models.decoder import Decoder
from actors.stage.vocab_parallel import DRAW_FAILED, NO_SCORE, winners
from actors.transport.group import RankGroup
from kernels.graph_support import GraphSupport
from kernels.sampling import SamplingRows, or_minus_one
from kernels.upload import upload


class GraphDraw:
    """On every rank of the last stage. Its buffers are static: a step overwrites the results of the
    one before, so what is queued after a graph comes before the next one.

    num_ranks: of the stage.
    """

    def __init__(
        self,
        decoder: Decoder,
        group: RankGroup,
        support: GraphSupport,
        max_draws: int,
        num_rows: int,
    ) -> None:
        """max_draws: of a step, numbered from 0. num_rows: of the persistent batch; a token of row
        `num_rows` is read by no step."""
        self.num_ranks = group.size
        self._decoder = decoder
        self._group = group
        self._support = support
        self._device = device = decoder.device
        # The token last drawn for each row of the persistent batch, and a place for those of none.
        self._drawn_R = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        # All graphs share these. Separate buffers would hold memory for each size permanently,
        # although only the latest step's result is read.
        width = decoder.shard_width
        self._logits_SV = torch.empty((max_draws, width), dtype=torch.float32, device=device)
        self._tokens_S = torch.empty(max_draws, dtype=torch.int32, device=device)
        self._landing = TokenLanding(max_draws, device)

    def pack(self, rows: SamplingRows) -> NDArray[np.float64]:
        """Parameters of the draws inside the graph, (S, 3). A shard does not know which of its
        tokens top_k, top_p and min_p keep."""
        return self._support.pack_rows(rows if self.num_ranks == 1 else rows.uncut())

    # ---- inside the graph ------------------------------------------------------------------

    def known(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Replace the placeholders, -1 - row, by the token last drawn for that row."""
        drawn_T = self._drawn_R.index_select(0, (-1 - tokens_T).clamp_(min=0))
        return torch.where(tokens_T < 0, drawn_T, tokens_T)

    def draw(
        self, normed_SH: torch.Tensor, packed_S3: torch.Tensor, batch_rows_S: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and tokens, as `StepOutput` has them. batch_rows_S: the row of each draw in the
        persistent batch, where its next step finds the token."""
        num_draws = len(normed_SH)
        logits_SV = self._logits_SV[:num_draws]
        if self.num_ranks == 1:
            self._decoder.logits(normed_SH, logits_SV)
            _, drawn_S = self._support.draw(logits_SV, packed_S3, 0)
            tokens_S = or_minus_one(drawn_S, logits_SV)
        else:
            logits_SV.copy_(self._decoder.sharded_logits(normed_SH))
            tokens_S = self._exchange(logits_SV, packed_S3)
        self._drawn_R.index_copy_(0, batch_rows_S.long(), tokens_S.clamp(min=0))
        return logits_SV, self._tokens_S[:num_draws].copy_(tokens_S)

    def _exchange(self, sharded_SV: torch.Tensor, packed_S3: torch.Tensor) -> torch.Tensor:
        logits_SV, first_id = self._decoder.local_logits(sharded_SV)
        if logits_SV.shape[1]:
            scores_S, tokens_S = self._support.draw(logits_SV, packed_S3, first_id)
        else:
            scores_S = packed_S3.new_full((len(packed_S3),), NO_SCORE)
            tokens_S = torch.zeros_like(scores_S, dtype=torch.int32)
        return winners(self._group, scores_S, tokens_S)

    # ---- queued after the graph --------------------------------------------------------------

    def whole_logits(self, draws: NDArray[np.intp]) -> torch.Tensor | None:
        """A copy of the logits (R, vocabulary) of some draws, on rank 0; None on the others. Every
        rank calls it."""
        logits_RV = self.pick(self._logits_SV, draws)
        return logits_RV if self.num_ranks == 1 else self._decoder.gather_logits(logits_RV)

    def sample(self, logits_RV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """int32 tokens of adjusted logits; -1 where they are not finite."""
        packed_R3 = upload(self._support.pack_rows(rows), self._device)
        return or_minus_one(self._support.draw(logits_RV, packed_R3, 0)[1], logits_RV)

    def put(
        self,
        draws: NDArray[np.intp],
        rows_S: NDArray[np.intp],
        tokens_R: torch.Tensor | None,
    ) -> None:
        """Other tokens for some draws, whose rows of the persistent batch are rows_S. Every rank
        calls it, and rank 0's tokens count; None there: the draw failed."""
        if tokens_R is None:
            tokens_R = torch.full_like(self._tokens_S[: len(draws)], DRAW_FAILED)
        tokens_R = self._group.broadcast(tokens_R)
        self._drawn_R.index_copy_(0, self._upload(rows_S), tokens_R.clamp(min=0))
        self._tokens_S.index_copy_(0, self._upload(draws), tokens_R)

    def gather_logprobs(
        self, draws: NDArray[np.intp], logits_RV: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, ...]:
        """Log-probabilities of the tokens of some draws, from their unadjusted logits; they
        arrive on the host before tokens that are fetched after this."""
        tokens_R = self.pick(self._tokens_S, draws).long().clamp(min=0)
        logprobs = self._support.gather_logprobs(logits_RV, tokens_R, num_top)
        return tuple(x.to("cpu", non_blocking=True) for x in logprobs)

    def fetch_tokens(self, count: int) -> Landing:
        """Start copying the first `count` tokens back."""
        return self._landing.fetch(self._tokens_S[:count])

    def pick(self, values: torch.Tensor, numbers: NDArray[np.intp]) -> torch.Tensor:
        """A copy of some rows."""
        return values.index_select(0, self._upload(numbers))

    def _upload(self, numbers: NDArray[np.intp]) -> torch.Tensor:
        return upload(numbers.astype(np.int64), self._device)
