"""Records of iterations for the timeline, the metrics and the logs."""

from __future__ import annotations

from actors.scheduling.core import Core
from actors.scheduling.plan import StepResult
from actors.scheduling.state import InFlight
from actors.transport.messages import IterationRecord

_RECORDS_EVERY_S = 0.1  # records are sent this often while there are steps


class IterationRecords:
    """Collects iteration records to send several at a time.

    Sending one per iteration would cost more: after each step the code for it is no longer in the
    CPU caches.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._gathered: list[IterationRecord] = []
        self.due: list[IterationRecord] = []  # to be sent with the next outputs
        self._due_s = 0.0  # time of the last move to `due`

    def note(self, step: InFlight, done_s: float, answer: StepResult, recoveries: int) -> None:
        """Add a record; all become due periodically, and when the engine becomes idle."""
        num_decodes, core, engine = step.num_decode_tokens, self._core, self._core.view
        self._gathered.append(
            IterationRecord(
                step=step.plan.step_id,
                submitted_s=step.planned_at_s,
                done_s=done_s,
                predicted_s=step.predicted_s,
                num_decode_tokens=num_decodes,
                num_prefill_tokens=step.num_tokens - num_decodes,
                num_requests=len(step.plan.slices),
                stages_s=answer.stage_times_s,
                num_decoding=len(engine.decoding),
                num_prefilling=len(engine.prefilling),
                num_waiting=engine.num_waiting,
                num_free_blocks=engine.num_free_blocks,
                num_preemptions=core.num_preemptions,
                num_recoveries=recoveries,
                token_budget=core.token_budget,
                holds_starts=core.holds_starts,
            )
        )
        if not core.in_flight or done_s - self._due_s >= _RECORDS_EVERY_S:
            self.due += self._gathered
            self._gathered.clear()
            self._due_s = done_s
