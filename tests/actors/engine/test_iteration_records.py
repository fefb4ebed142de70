"""Records of iterations gather for a while, and none stays behind when the engine rests."""

from __future__ import annotations

from actors.engine.iteration_records import IterationRecords
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
        result = StepResult(plan.step_id, tuple((s.request_id, 9) for s in plan.parts))
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


def _note(records: IterationRecords, step: InFlight, done_s: float) -> list[IterationRecord]:
    records.note(step, done_s, StepResult(step.plan.step_id, ()), 0)
    due, records.due = records.due, []
    return due
