"""Finishes a captured step while the device continues.

`Head` waits for logits to draw. Here all draws are in the graph; work for single
requests (e.g. log-probabilities) is queued after it, for their rows only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import StepPlan, StepResult, TokenLogprobs
from actors.stage.cuda.graph_draw import GraphDraw
from actors.stage.drafts import Draws, accept
from actors.stage.extra_outputs import as_logprobs
from actors.stage.head import Sampler, adjusted, samples_locally
from actors.stage.host_batch import HostBatch
from actors.stage.input_batch import InputBatch
from actors.stage.landing import Landing
from actors.stage.vocab_parallel import DRAW_FAILED


@dataclass(frozen=True, slots=True)
class Pending:
    """A captured step whose answer is being copied to the host.

    ids, rows_S and positions_S are those of its draws. asking: those among them that want
    log-probabilities, with `counts` alternatives each. logprobs: on rank 0.
    """

    plan: StepPlan
    ids: list[int]
    rows_S: NDArray[np.intp]
    positions_S: NDArray[np.int64]
    asking: NDArray[np.intp]
    counts: list[int]
    logprobs: tuple[torch.Tensor, ...]
    landing: Landing


class CapturedHead:
    """Turns the output of a graph into a StepResult in two halves: `start` and `end`. Every rank
    calls both, in the same order of steps."""

    def __init__(self, draw: GraphDraw, input_batch: InputBatch, sampler: Sampler | None) -> None:
        """sampler: on rank 0 only."""
        self._draw = draw
        self._input_batch = input_batch
        self._sampler = sampler

    @property
    def num_ranks(self) -> int:
        return self._draw.num_ranks

    def start(self, plan: StepPlan, host: HostBatch, draws: Draws) -> Pending:
        """Queue on the device all that a captured step still owes its requests, each its own: draws
        that are not the graph's, log-probabilities, and the way back of it all. `end` waits for it;
        what is launched in between finds every drawn token.

        Which rows are drawn again follows from their parameters, so ranks agree on it.
        """
        rows_S, positions_S = host.rows_S[draws.slices_N], draws.positions_N
        columns = self._input_batch.columns
        asking = np.flatnonzero(columns.logprobs_R[rows_S] >= 0)
        if self.num_ranks > 1:
            again = np.flatnonzero(~samples_locally(columns, rows_S, positions_S))
        else:
            again = adjusted(columns, rows_S, positions_S)
        raw_AV: torch.Tensor | None = None  # unadjusted logits of those that ask
        if again.size:
            raw_AV = self._redraw(rows_S, positions_S, again, asking)
        counts = columns.logprobs_R[rows_S[asking]].tolist()
        if counts and self.num_ranks == 1:
            raw_AV = self._draw.whole_logits(asking)
        logprobs: tuple[torch.Tensor, ...] = ()
        if raw_AV is not None:
            logprobs = self._draw.gather_logprobs(asking, raw_AV, max(counts))
        landing = self._draw.fetch_tokens(len(rows_S))
        ids = [plan.slices[i][0] for i in draws.slices_N.tolist()]
        return Pending(plan, ids, rows_S, positions_S, asking, counts, logprobs, landing)

    def _redraw(
        self,
        rows_S: NDArray[np.intp],
        positions_S: NDArray[np.int64],
        again: NDArray[np.intp],
        asking: NDArray[np.intp],
    ) -> torch.Tensor | None:
        """Draw from whole, adjusted logits, and tell all ranks. Returns rank 0's unadjusted logits
        of those that ask, where there are several ranks (they are among `again`)."""
        rows_R, positions_R = rows_S[again], positions_S[again]
        logits_RV = self._draw.whole_logits(again)
        raw_AV: torch.Tensor | None = None
        drawn_R: torch.Tensor | None = None
        try:
            if self._sampler is not None and logits_RV is not None:
                if asking.size and self.num_ranks > 1:
                    raw_AV = self._draw.pick(logits_RV, np.searchsorted(again, asking))
                columns = self._input_batch.columns
                changed = adjusted(columns, rows_R, positions_R)
                without: dict[int, int] = {}
                if changed.size:
                    without = self._sampler.adjust(logits_RV, rows_R, positions_R, changed)
                drawn_R = self._draw.sample(logits_RV, columns.draws(rows_R, positions_R))
                for r, why in without.items():
                    drawn_R[r] = why
        finally:
            # Also after a failure: the other ranks queue their part of this and would hang.
            self._draw.put(again, rows_R, drawn_R)
        return raw_AV

    def end(self, pending: Pending) -> StepResult | None:
        """The result of a step that was started, on rank 0; None on the others. Waits for its
        tokens."""
        drawn_S = pending.landing.wait().numpy().astype(np.int64)
        # A step launched after this one reads these as token ids.
        self._input_batch.put_tokens(pending.rows_S, pending.positions_S, drawn_S.clip(min=0))
        if drawn_S.size and drawn_S.min() == DRAW_FAILED:
            raise RuntimeError("rank 0 failed to sample")
        if self._sampler is None:
            return None
        logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
        if pending.logprobs:
            chosen_R, rank_R, top_RK, ids_RK = (x.numpy() for x in pending.logprobs)
            entries = as_logprobs(
                drawn_S[pending.asking], (chosen_R, rank_R, top_RK, ids_RK), pending.counts
            )
            ids = [pending.ids[i] for i in pending.asking.tolist()]
            logprobs = tuple(zip(ids, entries, strict=True))
        tokens = tuple(zip(pending.ids, drawn_S.tolist(), strict=True))
        plan = pending.plan
        if plan.drafts:
            return accept(plan.step_id, tokens, logprobs, dict(plan.drafts))
        return StepResult(plan.step_id, tokens, logprobs)
