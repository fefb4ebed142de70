"""What each iteration was, for metrics and traces."""

from __future__ import annotations

from actors.scheduling.core import Core
from actors.scheduling.plan import StepResult
from actors.scheduling.state import InFlight
from actors.transport.messages import IterationRecord

_PERIOD_S = 0.1  # how long records wait for others, while there are steps


class IterationRecords:
    """Gathered until it is time to send them.

    Records travel some at a time because a step leaves cold caches, and handling one record an
    iteration would fetch all the code for it anew.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._gathered: list[IterationRecord] = []
        self.due: list[IterationRecord] = []  # to travel with the next outputs
        self._due_s = 0.0  # when some last were

    def note(self, step: InFlight, done_s: float, answer: StepResult, recoveries: int) -> None:
        """Records fall due every so often, and all before the engine rests."""
        num_decodes, core, engine = step.num_decode_tokens, self._core, self._core.view
        self._gathered.append(
            IterationRecord(
                step.plan.step_id,
                step.planned_at_s,
                done_s,
                step.predicted_s,
                num_decodes,
                step.num_tokens - num_decodes,
                len(step.plan.slices),
                answer.stage_times_s,
                len(engine.decoding),
                len(engine.prefilling),
                engine.num_waiting,
                engine.num_free_blocks,
                core.num_preemptions,
                recoveries,
                core.token_budget,
            )
        )
        if not core.in_flight or done_s - self._due_s >= _PERIOD_S:
            self.due += self._gathered
            self._gathered.clear()
            self._due_s = done_s
