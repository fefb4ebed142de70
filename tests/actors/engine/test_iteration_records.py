"""Records of iterations gather for a while, and none stays behind when the engine rests."""

from __future__ import annotations

import pytest

from actors.engine.iteration_records import IterationRecords, StageClocks
from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import Execute, StepDone, Submit
from actors.scheduling.plan import StepResult
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.state import InFlight
from actors.transport.messages import IterationRecord

PROMPT, OUTPUT, STEP_S = 5, 40, 0.03


def test_batches_of_a_tenth_of_a_second_and_the_rest_at_once() -> None:
    core = build_core(SchedulerConfig(num_blocks=64, lookahead=False))
    records = IterationRecords(core)
    now_s = 100.0
    request = Request(1, (7,) * PROMPT, SamplingParams(OUTPUT, min_tokens=OUTPUT), now_s)
    instructions = core.handle(Submit(request), now_s)
    batches: list[tuple[float, list[int]]] = []
    while plans := [i.plan for i in instructions if isinstance(i, Execute)]:
        (plan,) = plans
        now_s += STEP_S
        planned = core.in_flight[0]
        result = StepResult(plan.step_id, tuple((s.request_id, 9) for s in plan.named_slices))
        instructions = core.handle(StepDone(result), now_s)
        if due := _note(records, planned, now_s):
            batches.append((now_s, [record.step for record in due]))
    assert [step for _, steps in batches for step in steps] == list(range(OUTPUT))
    assert batches[-1][0] == now_s  # the engine rests: nothing is kept back
    assert 3 * len(batches) <= OUTPUT + 3


def test_a_record_says_what_the_step_was_made_of() -> None:
    core = build_core(SchedulerConfig(num_blocks=64, lookahead=False))
    records = IterationRecords(core)
    request = Request(1, (7,) * PROMPT, SamplingParams(OUTPUT), 0.0)
    core.handle(Submit(request), 0.0)
    sent = []
    for done_s in (0.5, 0.75):
        planned = core.in_flight[0]
        core.handle(StepDone(StepResult(planned.plan.step_id, ((1, 9),))), done_s)
        sent += _note(records, planned, done_s)
    prefill, decode = sent
    assert (prefill.num_prefill_tokens, prefill.num_decode_tokens) == (PROMPT, 0)
    assert (decode.num_prefill_tokens, decode.num_decode_tokens) == (0, 1)
    assert prefill.done_s == 0.5
    assert decode.num_decoding == 1


def _record(submitted_s: float, done_s: float, *stages_s: tuple[float, float]) -> IterationRecord:
    return IterationRecord(1, submitted_s, done_s, None, 1, 0, 1, stages_s, 1, 0, 0, 9, 0, 0, 64)


def test_times_of_this_node_stay_as_they_are() -> None:
    record = _record(10.0, 10.3, (10.01, 10.1), (10.1001, 10.3001))  # devices time with an error
    assert StageClocks().aligned(record) is record


@pytest.mark.parametrize("ahead_s", [-80_000.0, 3e6])
def test_times_of_another_node_are_brought_to_the_scheduler_s_clock(ahead_s: float) -> None:
    clocks = StageClocks()

    def of_second_stage(begin_s: float, moved_s: float) -> tuple[float, float]:
        """Its time by this clock, in a step that waits for it at first, and less later."""
        far = (begin_s + 0.1 + ahead_s, begin_s + 0.3 + ahead_s)
        record = _record(begin_s - moved_s, begin_s + 0.3 + moved_s, (begin_s, begin_s + 0.1), far)
        here, there = clocks.aligned(record).stages_s
        assert here == (begin_s, begin_s + 0.1)
        assert there[1] - there[0] == pytest.approx(0.2)
        assert record.submitted_s <= there[0] < there[1] <= record.done_s
        return there

    of_second_stage(10.0, 0.2)
    assert of_second_stage(20.0, 0.001)[0] == pytest.approx(20.05, abs=0.01)
    assert of_second_stage(30.0, 0.2)[0] == pytest.approx(30.05, abs=0.01)  # it has learnt
    ahead_s += 55.0  # the stage is rebuilt on a third node
    of_second_stage(40.0, 0.001)


def _note(records: IterationRecords, step: InFlight, done_s: float) -> list[IterationRecord]:
    records.note(step, done_s, StepResult(step.plan.step_id, ()), 0)
    due, records.due = records.due, []
    return due
