"""One gap of each cause, made by hand; the objective is 100 ms, a step of 10 decodes takes 20."""

from __future__ import annotations

import pytest

from actors.transport.messages import IterationRecord
from app.telemetry.causes import MEANINGS, Cause, Explanation, Gap, explain

OBJECTIVE_S = 0.1


def step(
    number: int,
    done_s: float,
    decodes: int,
    prefill: int,
    stages_s: tuple[float, ...],
    *,
    predicted_s: float | None = None,
    preemptions: int = 0,
    recoveries: int = 0,
) -> IterationRecord:
    """A step whose last stage ends as it is done; stages_s: how long each was busy."""
    begin_s, times = done_s - sum(stages_s), []
    for seconds in stages_s:
        times.append((begin_s, begin_s + seconds))
        begin_s += seconds
    return IterationRecord(
        number, times[0][0], done_s, predicted_s, decodes, prefill, decodes, tuple(times),
        decodes, 0, 0, 9, preemptions, recoveries, 512,
    )  # fmt: skip


EARLIER = [step(n, 0.02 * (n + 1), 10, 0, (0.02,)) for n in range(5)]
FROM_S = 0.1  # when the last of them ended


def cause_of(
    steps: list[IterationRecord], *, to_s: float | None = None, tokens: int = 1, of_steps: int = 1
) -> Explanation:
    end_s = steps[-1].done_s if to_s is None else to_s
    return explain(Gap(FROM_S, end_s, OBJECTIVE_S, tokens, of_steps), steps, EARLIER)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # A long chunk beside the decodes; a whole prompt before the decodes (vllm).
        ([step(5, 0.30, 10, 500, (0.2,))], Explanation(Cause.PREFILL, 5)),
        (
            [step(5, 0.30, 0, 500, (0.2,)), step(6, 0.32, 10, 0, (0.02,))],
            Explanation(Cause.PREFILL, 5),
        ),
        # As predicted, and there is nothing to leave out; with a little prefill on top.
        ([step(5, 0.25, 90, 0, (0.15,), predicted_s=0.15)], Explanation(Cause.DECODES, 5)),
        ([step(5, 0.25, 90, 6, (0.15,), predicted_s=0.15)], Explanation(Cause.DECODES, 5)),
        # Twice what was predicted; without a prediction, twice what such steps took.
        (
            [step(5, 0.30, 10, 64, (0.2,), predicted_s=0.06)],
            Explanation(Cause.SLOW_STAGE, 5),
        ),
        ([step(5, 0.30, 10, 0, (0.2,))], Explanation(Cause.SLOW_STAGE, 5)),
        # The engine did nothing for 180 ms before the step.
        ([step(5, 0.30, 10, 0, (0.02,))], Explanation(Cause.SCHEDULING, 5)),
        # Left out of step 5, whose blocks another needed, and computed again in step 6.
        (
            [
                step(5, 0.2, 9, 0, (0.1,), preemptions=1),
                step(6, 0.3, 9, 200, (0.1,), preemptions=1),
            ],
            Explanation(Cause.PREEMPTION, 5),
        ),
        # Another was preempted; this stream was in the only step of its gap.
        ([step(5, 0.30, 10, 500, (0.2,), preemptions=1)], Explanation(Cause.PREFILL, 5)),
        # New stages; a new scheduler, which numbers from 0.
        ([step(5, 3.0, 10, 500, (0.2,), recoveries=1)], Explanation(Cause.RECOVERY, 5)),
        ([step(0, 3.0, 10, 500, (0.2,))], Explanation(Cause.RECOVERY, 0)),
    ],
)
def test_the_cause_is_what_took_the_time(
    steps: list[IterationRecord], expected: Explanation
) -> None:
    assert cause_of(steps) == expected


def test_a_ready_token_that_waits_is_delivery() -> None:
    steady = [step(5 + n, FROM_S + 0.02 * (n + 1), 10, 0, (0.02,)) for n in range(10)]
    assert cause_of(steady[:1], to_s=0.4) == Explanation(Cause.DELIVERY, None)
    # Those of ten steps at once: the first was ready 180 ms before.
    assert cause_of(steady, tokens=10, of_steps=10) == Explanation(Cause.DELIVERY, None)
    # No step ended in between: the token was older than the gap.
    assert explain(Gap(0.1, 0.3, 0.1), [], EARLIER) == Explanation(Cause.DELIVERY, None)


def test_accepted_drafts_come_from_one_step() -> None:
    steps = [step(5, 0.30, 10, 500, (0.2,))]
    assert cause_of(steps, tokens=4) == Explanation(Cause.PREFILL, 5)


def test_stages_in_turn_are_busy_and_not_between_steps() -> None:
    """Two micro-batches in two stages: a step ends every 60 ms or so and takes 120."""
    steps = [step(5, 0.15, 10, 200, (0.06, 0.06)), step(6, 0.22, 10, 200, (0.06, 0.06))]
    assert cause_of(steps) == Explanation(Cause.PREFILL, 6)


def test_every_cause_is_explained() -> None:
    assert set(MEANINGS) == set(Cause)
