"""Why a gap between two tokens was longer than promised, from the iteration records around it.

The gap is cut into parts that add up to it: the time between steps, what a slow stage took too
long, decodes, prefill, and the wait of a finished token for its delivery. Its cause is the largest
part; the decodes' counts only where it alone would have missed. A rebuild of the engine in between,
a preemption while the stream sat out, or its move to another engine, which whoever asks has to
know, is the cause whatever the parts.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final, NamedTuple

from actors.transport.messages import IterationRecord

_FAR_OVER: Final = 2.0  # a step is slow from this multiple of its expected time


class Cause(enum.StrEnum):
    """Why an objective was missed."""

    PREFILL = "prefill"
    DECODES = "decodes"
    PREEMPTION = "preemption"
    SLOW_STAGE = "slow_stage"
    SCHEDULING = "scheduling"
    RECOVERY = "recovery"
    MOVE = "move"
    DELIVERY = "delivery"


MEANINGS: Final = {
    Cause.PREFILL: "too much prefill in its steps",
    Cause.DECODES: "so many decodes that they alone would have missed",
    Cause.PREEMPTION: "KV blocks were taken, and the stream sat out",
    Cause.SLOW_STAGE: "a step took far longer than expected",
    Cause.SCHEDULING: "time between steps",
    Cause.RECOVERY: "the engine was rebuilt in between",
    Cause.MOVE: "the stream went on at another engine",
    Cause.DELIVERY: "the token was ready: a slow client, or a busy replica",
}


class Gap(NamedTuple):
    """A time between tokens above its objective. num_tokens: delivered together at its end.

    Times are on the replica's clock, which is that of `submitted_s` and `done_s`.
    """

    from_s: float
    to_s: float
    objective_s: float
    num_tokens: int = 1


class Explanation(NamedTuple):
    """step: the one that has the most of the cause; None where no step has."""

    cause: Cause
    step: int | None


def explain(
    gap: Gap, steps: Sequence[IterationRecord], earlier: Sequence[IterationRecord]
) -> Explanation:
    """The cause of one missed gap.

    steps: the records that ended within the gap; earlier: some before it, which tell what decodes
    take without prefill. Both oldest first.
    """
    # Of several tokens delivered at once the first was ready by then: each took a step of its own.
    steps = steps[: max(0, len(steps) - gap.num_tokens + 1)]
    rebuilt = _first_after_rebuild((*earlier[-1:], *steps))
    if rebuilt is not None:
        return Explanation(Cause.RECOVERY, rebuilt.step)
    preempted = _first_after_preemption((*earlier[-1:], *steps))
    if preempted is not None and len(steps) > max(1, len(preempted.stages_s)):
        return Explanation(Cause.PREEMPTION, preempted.step)
    parts = dict.fromkeys(Cause, 0.0)
    most: dict[Cause, tuple[float, int]] = {}
    begin_s = gap.from_s
    for step in steps:
        for cause, seconds in _parts_of(step, step.done_s - begin_s, earlier).items():
            parts[cause] += seconds
            most[cause] = max(most.get(cause, (0.0, step.step)), (seconds, step.step))
        begin_s = step.done_s
    parts[Cause.DELIVERY] = gap.to_s - begin_s
    if parts[Cause.DECODES] <= gap.objective_s:
        del parts[Cause.DECODES]
    cause = max(parts, key=parts.__getitem__)
    return Explanation(cause, most[cause][1] if cause in most else None)


def why_late(ttft_s: float, queued_s: float) -> str:
    """What most of a time to first token went to: "queue" (before its first step) or "prefill"."""
    return "queue" if queued_s > ttft_s / 2 else "prefill"


def _first_after_rebuild(records: Iterable[IterationRecord]) -> IterationRecord | None:
    """A rebuilt scheduler numbers its steps from 0 again; one with new stages counts a recovery."""
    before: IterationRecord | None = None
    for record in records:
        if before is not None and (
            record.step < before.step or record.num_recoveries > before.num_recoveries
        ):
            return record
        before = record
    return None


def _first_after_preemption(records: Iterable[IterationRecord]) -> IterationRecord | None:
    before: IterationRecord | None = None
    for record in records:
        if before is not None and record.num_preemptions > before.num_preemptions:
            return record
        before = record
    return None


def _parts_of(
    step: IterationRecord, period_s: float, earlier: Sequence[IterationRecord]
) -> dict[Cause, float]:
    """The time from the step before to the end of this one, by what it went to."""
    busy_s = min(period_s, _stages_s(step) or period_s)
    alone_s = _similar_s(step.num_decode_tokens, earlier)
    slow_s = 0.0
    expected_s = step.predicted_s or (alone_s if not step.num_prefill_tokens else None)
    if expected_s is not None and step.stages_s:
        slowest_s = max(end_s - begin_s for begin_s, end_s in step.stages_s)
        if slowest_s > _FAR_OVER * expected_s:
            slow_s = min(busy_s, slowest_s - expected_s)
    rest_s = busy_s - slow_s
    decodes_s = rest_s
    if step.num_prefill_tokens:
        num_tokens = step.num_decode_tokens + step.num_prefill_tokens
        share = step.num_decode_tokens / num_tokens
        if share and alone_s is not None and busy_s:
            share = min(1.0, max(share, alone_s / (_stages_s(step) or busy_s)))
        decodes_s = share * rest_s
    return {
        Cause.SCHEDULING: period_s - busy_s,
        Cause.SLOW_STAGE: slow_s,
        Cause.DECODES: decodes_s,
        Cause.PREFILL: rest_s - decodes_s,
    }


def _stages_s(record: IterationRecord) -> float:
    """Busy time of all stages; durations alone, as the stages' clocks may be other nodes'."""
    return sum(end_s - begin_s for begin_s, end_s in record.stages_s)


def _similar_s(num_decodes: int, records: Sequence[IterationRecord]) -> float | None:
    """What that many decodes take without prefill: the median of the steps that come nearest."""
    alone = [r for r in records if r.stages_s and r.num_decode_tokens and not r.num_prefill_tokens]
    if not alone or not num_decodes:
        return None
    nearest = min(abs(r.num_decode_tokens - num_decodes) for r in alone)
    return median(_stages_s(r) for r in alone if abs(r.num_decode_tokens - num_decodes) == nearest)
