"""Launching the next step before the tokens of the one before have reached the host.

With one stage the scheduler plans a step ahead (`lookahead`), so the plan of step N + 1 is often
here while N runs. Its decodes continue with tokens that are so far on the GPU alone; a captured
step takes them from the device buffer in which the draw of step N leaves them. So the GPU goes
from step to step without waiting for the host, and the host waits once a step, for tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from actors.scheduling.plan import StepPlan
from actors.stage.cuda_graphs import StepGraphs, StepOutput
from actors.stage.input_batch import HostBatch, InputBatch


@dataclass(frozen=True, slots=True)
class Launched:
    """A step handed to the device, whose results have not been read."""

    step_id: int
    host: HostBatch
    output: StepOutput


class RunAhead:
    """Holds at most one step launched ahead of its turn."""

    def __init__(self, graphs: StepGraphs, input_batch: InputBatch) -> None:
        self._graphs = graphs
        self._input_batch = input_batch
        self._launched: Launched | None = None

    def take(self, step_id: int) -> Launched | None:
        """The step, if it was launched ahead. Any other is dropped: it is executed when its plan
        comes."""
        launched, self._launched = self._launched, None
        return launched if launched is not None and launched.step_id == step_id else None

    def launch(
        self,
        current: Launched,
        following: Callable[[], StepPlan | None],
        apply: Callable[[StepPlan], None],
    ) -> StepOutput:
        """Launch what follows the current step, where both allow it.

        apply: brings the persistent batch and the cache to a plan. Returns the current step's
        output as it must be read: with tokens on the host, if the device has moved on.
        """
        if current.output.tokens_S is None or not self._wants_tokens_alone(current.host):
            return current.output
        plan = following()
        if plan is None or not self._may_follow(plan, current.host):
            return current.output
        fetch = self._graphs.fetch_tokens(current.output, len(current.host.rows_S))
        try:
            apply(plan)
            self._mark_unknown(current.host)
            host = self._input_batch.gather(plan.slices)
            output = self._graphs.run(host, None)
        except (KeyError, ValueError):
            # The plan is bad: it fails when its turn comes, not in this step's name.
            output = None
        if output is not None:
            self._launched = Launched(plan.step_id, host, output)
        return StepOutput(current.output.x_TH, current.output.residual_TH, tokens_S=fetch())

    def _wants_tokens_alone(self, host: HostBatch) -> bool:
        """The step yields nothing but tokens, drawn from its logits as they are."""
        columns, rows_S = self._input_batch.columns, host.rows_S
        held_back_S = host.ends_S - columns.num_prompt_R[rows_S] < columns.min_tokens_R[rows_S]
        special_S = held_back_S | columns.adjusts_R[rows_S] | columns.pools_R[rows_S]
        special_S |= columns.logprobs_R[rows_S] >= 0
        special_S |= columns.prompt_logprobs_R[rows_S] >= 0
        return not bool(special_S.any())

    def _may_follow(self, plan: StepPlan, host: HostBatch) -> bool:
        """Rows of the current step must stay until its tokens are noted, and a swap would wait for
        the device."""
        if not plan.slices or plan.drafts or plan.swap_out or plan.swap_in:
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
