"""Launching the next step before the last one's tokens have reached the host.

With one stage the scheduler plans a step ahead (`lookahead`), so the plan of step N + 1 is often
here while N runs. Its decodes continue with tokens that only the GPU knows yet; a captured step
takes them from the device buffer in which the draw of step N left them. So the GPU goes from step
to step without waiting for the host, and the host waits once a step, for tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from actors.scheduling.plan import StepPlan
from actors.stage.batch import HostBatch, gather_batch
from actors.stage.cuda_graphs import StepGraphs, StepOutput
from actors.stage.input_batch import RequestState


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the GPU has, or had: nothing of it has been read."""

    step_id: int
    host: HostBatch
    output: StepOutput


class RunAhead:
    """Holds at most one step launched ahead of its turn."""

    def __init__(self, graphs: StepGraphs, state: RequestState, block_size: int) -> None:
        self._graphs = graphs
        self._state = state
        self._block_size = block_size
        self._launched: Launched | None = None

    def take(self, step_id: int) -> Launched | None:
        """The step, if it was launched ahead. Any other is dropped: it will be planned anew."""
        launched, self._launched = self._launched, None
        return launched if launched is not None and launched.step_id == step_id else None

    def clear(self) -> None:
        self._launched = None

    def launch(
        self,
        current: Launched,
        following: Callable[[], StepPlan | None],
        apply: Callable[[StepPlan], None],
    ) -> StepOutput:
        """Launch what follows the current step, where both allow it.

        apply: brings state and cache to a plan. Returns the current step's output as its reader
        must take it: with tokens on the host, if the device has moved on.
        """
        if current.output.tokens_S is None or not self._is_plain(current.host):
            return current.output
        plan = following()
        if plan is None or not self._may_follow(plan, current.host):
            return current.output
        fetch = self._graphs.fetch_tokens(current.output, len(current.host.rows_S))
        try:
            apply(plan)
            self._mark_unknown(current.host)
            host = gather_batch(self._state, plan.slices, self._block_size)
            output = self._graphs.run(host, None)
        except (KeyError, ValueError):
            # The plan is bad: it will say so when its turn comes, not in this step's name.
            output = None
        if output is not None:
            self._launched = Launched(plan.step_id, host, output)
        return StepOutput(current.output.x_TH, current.output.residual_TH, tokens_S=fetch())

    def _is_plain(self, host: HostBatch) -> bool:
        """Nothing but tokens is wanted of the step, drawn from its logits as they are."""
        columns, rows_S = self._state.columns, host.rows_S
        held_back_S = host.ends_S - columns.num_prompt_R[rows_S] < columns.min_tokens_R[rows_S]
        special_S = held_back_S | columns.adjusts_R[rows_S] | columns.pools_R[rows_S]
        special_S |= columns.logprobs_R[rows_S] >= 0
        special_S |= columns.prompt_logprobs_R[rows_S] >= 0
        return not bool(special_S.any())

    def _may_follow(self, plan: StepPlan, host: HostBatch) -> bool:
        """Rows of the current step must stay until its tokens are noted; swaps would wait."""
        if not plan.slices or plan.swap_out or plan.swap_in:
            return False
        current = set(host.rows_S.tolist())
        gone = (self._state.row(r) for r in plan.released if r in self._state)
        restarted = (
            self._state.row(s.request_id) for s in plan.started if s.request_id in self._state
        )
        return current.isdisjoint(gone) and current.isdisjoint(restarted)

    def _mark_unknown(self, host: HostBatch) -> None:
        """-1 - row stands for the token that the draw of this row is about to leave there."""
        rows_S = host.rows_S[host.samples_S]
        positions_S = host.ends_S[host.samples_S].astype(np.int64)
        self._state.put_tokens(rows_S, positions_S, -1 - rows_S.astype(np.int64))
