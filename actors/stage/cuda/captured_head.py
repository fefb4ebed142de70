"""Finishes a captured step of a single stage while the device continues.

`Head` waits for logits to draw. Here the draws of all slices are in the graph; work for single
requests (e.g. log-probabilities) is queued after it, for their rows only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import StepPlan, StepResult, TokenLogprobs
from actors.stage.cuda.graphs import StepGraphs, StepOutput
from actors.stage.extra_outputs import as_logprobs
from actors.stage.head import Sampler
from actors.stage.host_batch import HostBatch
from actors.stage.input_batch import InputBatch
from actors.stage.landing import Landing
from actors.stage.models.decoder import NotFinite


@dataclass(frozen=True, slots=True)
class Pending:
    """A captured step whose answer is being copied to the host.

    sampling: its slices that draw; ids, rows_S and positions_S are theirs. asking: those among them
    that want log-probabilities, with `counts` alternatives each.
    """

    step_id: int
    ids: list[int]
    sampling: NDArray[np.intp]
    rows_S: NDArray[np.intp]
    positions_S: NDArray[np.int64]
    asking: NDArray[np.intp]
    counts: list[int]
    logprobs: tuple[torch.Tensor, ...]
    landing: Landing


class CapturedHead:
    """Turns the output of a graph into a StepResult in two halves: `start` and `end`."""

    def __init__(self, graphs: StepGraphs, input_batch: InputBatch, sampler: Sampler) -> None:
        self._graphs = graphs
        self._input_batch = input_batch
        self._sampler = sampler

    def start(self, plan: StepPlan, host: HostBatch, output: StepOutput) -> Pending:
        """Queue on the device all that a captured step still owes its requests, each its own: draws
        from adjusted logits, log-probabilities, and the way back of it all. `end` waits for it;
        what is launched in between finds every drawn token. Nothing may be asked of
        its prompt rows."""
        sampling = np.flatnonzero(host.samples_S)
        rows_S = host.rows_S[sampling]
        positions_S = host.ends_S[sampling].astype(np.int64)
        columns, sampler = self._input_batch.columns, self._sampler
        special = sampler.adjusted(rows_S, positions_S)
        if special.size:
            rows_R, positions_R = rows_S[special], positions_S[special]
            all_special = np.arange(len(special))
            self._graphs.redraw(
                output,
                sampling[special],
                rows_R,
                lambda logits_RV: sampler.adjust(logits_RV, rows_R, positions_R, all_special),
                columns.draws(rows_R, positions_R),
            )
        asking = np.flatnonzero(columns.logprobs_R[rows_S] >= 0)
        counts = columns.logprobs_R[rows_S[asking]].tolist()
        logprobs = (
            self._graphs.gather_logprobs(output, sampling[asking], max(counts)) if counts else ()
        )
        landing = self._graphs.fetch_tokens(output, len(host.rows_S))
        ids = [plan.slices[i][0] for i in sampling.tolist()]
        return Pending(
            plan.step_id, ids, sampling, rows_S, positions_S, asking, counts, logprobs, landing
        )

    def end(self, pending: Pending) -> StepResult:
        """The result of a step that was started; waits for its tokens."""
        tokens_S = pending.landing.wait().numpy()
        drawn_S = tokens_S[pending.sampling].astype(np.int64)
        if drawn_S.size and drawn_S.min() < 0:
            raise NotFinite
        self._input_batch.put_tokens(pending.rows_S, pending.positions_S, drawn_S)
        logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
        if pending.logprobs:
            chosen_R, rank_R, top_RK, ids_RK = (x.numpy() for x in pending.logprobs)
            entries = as_logprobs(
                drawn_S[pending.asking], (chosen_R, rank_R, top_RK, ids_RK), pending.counts
            )
            ids = [pending.ids[i] for i in pending.asking.tolist()]
            logprobs = tuple(zip(ids, entries, strict=True))
        tokens = tuple(zip(pending.ids, drawn_S.tolist(), strict=True))
        return StepResult(pending.step_id, tokens, logprobs)
