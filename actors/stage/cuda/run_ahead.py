"""Launches the next step before the tokens of its predecessor have reached the host.

With one stage the scheduler plans a step ahead (`lookahead`), so the plan of step N + 1 is often
here while N runs. Its decodes continue tokens that are still only on the GPU; a captured step takes
them from the device buffer that the draw of step N writes. So the GPU does not wait for the host
between steps, and the host waits once per step, for tokens; meanwhile it also polls for the plan.

With several stages the scheduler plans no step ahead: the first stage would need tokens that are
only on the last one's device, and the graph of stages has no way back. Stages before the last wait
for no tokens; they queue each micro-batch as its plan comes.

A step with drafts may be launched ahead, but nothing ahead of its end: which tokens follow is
known once its drafts are compared, on the host.

Work for single requests (penalties, grammars, log-probabilities) is queued after the graph, for
their rows only: it needs tokens up to N - 1, which the host has by then.

Several ranks do this each by itself, so one may launch N + 1 while another, whose plan came late,
has ended N first. Yet all queue the same collective operations in the same order: those of the
graph of N, those after it, then those of N + 1. What they are follows from the plans, which all
ranks receive in the same order and of which none is withdrawn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from actors.scheduling.plan import StepPlan, StepResult
from actors.stage.cuda.captured_head import CapturedHead
from actors.stage.cuda.graphs import StepGraphs, StepOutput
from actors.stage.drafts import Draws, draws_of
from actors.stage.host_batch import HostBatch
from actors.stage.input_batch import InputBatch
from actors.stage.states import RecurrentStates

_log = logging.getLogger(__name__)

# Longest sleep of one wait for the next plan between two checks for the tokens.
_LOOK_S = 0.0002

# The plan to be executed next, waited for up to so many seconds; None if it is not here by then.
Following = Callable[[float], StepPlan | None]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step queued on the device, whose results have not been read. draws: on the last stage."""

    step_id: int
    host: HostBatch
    draws: Draws | None
    output: StepOutput


class RunAhead:
    """Holds at most one step launched ahead of its turn."""

    def __init__(
        self,
        graphs: StepGraphs,
        input_batch: InputBatch,
        head: CapturedHead,
        states: RecurrentStates | None = None,
    ) -> None:
        self._graphs = graphs
        self._states = states
        self._input_batch = input_batch
        self._head = head
        self._launched: Launched | None = None

    def pop(self, step_id: int) -> Launched | None:
        """The step, if it was launched ahead. One rank drops any other, which is executed when its
        plan comes. Several would not have launched it alike: RuntimeError."""
        launched, self._launched = self._launched, None
        if launched is None or launched.step_id == step_id:
            return launched
        if self._head.num_ranks > 1:
            raise RuntimeError(
                f"step {step_id} came after step {launched.step_id} had been launched ahead of it"
            )
        return None

    def finish(
        self,
        plan: StepPlan,
        current: Launched,
        following: Following | None,
        apply: Callable[[StepPlan], None],
    ) -> StepResult | None:
        """The current step's result on rank 0, None on the others; what follows it is launched
        before, where it allows it. Of the current step only its draws may still be missing.

        apply: brings the persistent batch and the cache to a plan.
        """
        assert current.draws is not None
        pending = self._head.start(plan, current.host, current.draws)
        upcoming = None
        if following is not None and not plan.drafts:
            upcoming = following(0.0)
            while upcoming is None and not pending.landing.is_done():
                upcoming = following(_LOOK_S)
        if upcoming is not None and self._may_follow(upcoming, current.host):
            self._launch(upcoming, current.host, apply)
        return self._head.end(pending)

    def _launch(
        self, plan: StepPlan, current: HostBatch, apply: Callable[[StepPlan], None]
    ) -> None:
        try:
            apply(plan)
            self._mark_unknown(current)
            host = self._input_batch.gather(plan.slices)
            if self._states is not None:
                self._states.note(plan, host)
            draws = draws_of(plan, host)
            output = self._graphs.run(host, None, draws)
        except Exception:  # of any type: in its own turn it succeeds, or fails in its own name
            _log.warning("step %d was not launched ahead", plan.step_id, exc_info=True)
            return
        if output is not None:
            self._launched = Launched(plan.step_id, host, draws, output)

    def _may_follow(self, plan: StepPlan, host: HostBatch) -> bool:
        """Rows of the current step must stay until its tokens are noted. Swaps and copies are
        queued behind the current step and wait for nothing."""
        if not plan.slices:
            return False
        current = set(host.rows_S.tolist())
        changed = (*plan.released, *(start.request_id for start in plan.started))
        rows = (self._input_batch.row(r) for r in changed if r in self._input_batch)
        return current.isdisjoint(rows)

    def _mark_unknown(self, host: HostBatch) -> None:
        """-1 - row is the placeholder of the token that the device is about to draw for a row."""
        rows_S = host.rows_S[host.samples_S]
        positions_S = host.ends_S[host.samples_S].astype(np.int64)
        self._input_batch.put_tokens(rows_S, positions_S, -1 - rows_S.astype(np.int64))
