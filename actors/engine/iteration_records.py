"""Records of iterations for the timeline, the metrics and the logs."""

from __future__ import annotations

from actors.engine.peers import SAME_CLOCK_S
from actors.scheduling.core import Core
from actors.scheduling.plan import StepResult
from actors.scheduling.state import InFlight
from actors.transport.messages import IterationRecord

_RECORDS_EVERY_S = 0.1  # records are sent this often while there are steps


class StageClocks:
    """Brings the times of stages on other nodes, which count from other boots, to this clock.

    Times that lie within their step are of this node. From others one offset per stage is taken,
    the middle of what all steps so far allow: each began after its plan, and ended before its
    answer. It is off by at most half the time that a step which hardly waits spends elsewhere.
    """

    def __init__(self) -> None:
        self._offsets_s: dict[int, tuple[float, float]] = {}  # by stage: (least, most)

    def aligned(self, record: IterationRecord) -> IterationRecord:
        from_s, to_s = record.submitted_s - SAME_CLOCK_S, record.done_s + SAME_CLOCK_S
        if all(from_s <= begin_s and end_s <= to_s for begin_s, end_s in record.stages_s):
            return record
        times = []
        for stage, (begin_s, end_s) in enumerate(record.stages_s):
            offset_s = 0.0
            if begin_s < from_s or end_s > to_s:
                least, most = record.submitted_s - begin_s, record.done_s - end_s
                offset_s = self._offset_s(stage, least, most)
            times.append((begin_s + offset_s, end_s + offset_s))
        return record._replace(stages_s=tuple(times))

    def _offset_s(self, stage: int, least: float, most: float) -> float:
        known_least, known_most = self._offsets_s.get(stage, (least, most))
        if max(known_least, least) <= min(known_most, most):
            least, most = max(known_least, least), min(known_most, most)
        self._offsets_s[stage] = (least, most)  # else the clocks drifted, or the stage moved
        return (least + most) / 2


class IterationRecords:
    """Collects iteration records to send several at a time.

    Sending one per iteration would cost more: after each step the code for it is no longer in the
    CPU caches.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._clocks = StageClocks()
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
            self.due += map(self._clocks.aligned, self._gathered)
            self._gathered.clear()
            self._due_s = done_s
