"""Why a gap between two tokens missed its objective, from the iteration records around it.

The gap is divided into parts that add up to it: the time between steps, the excess of a slow stage,
decodes, prefill, and the wait of a finished token for delivery. The largest part is the cause;
decodes count only if they alone would have missed. A rebuild of the engine, a preemption of the
request, or a move to another engine, which the caller must report, takes precedence over the parts.
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
    Cause.DECODES: "its decodes alone would have missed the objective",
    Cause.PREEMPTION: "the request lost its KV blocks and had to wait",
    Cause.SLOW_STAGE: "a step took far longer than expected",
    Cause.SCHEDULING: "time between steps",
    Cause.RECOVERY: "the engine was rebuilt in between",
    Cause.MOVE: "the stream moved to another engine",
    Cause.DELIVERY: "the token was ready: a slow client, or a busy replica",
}


class Gap(NamedTuple):
    """A time between tokens above its objective. num_tokens: delivered together at its end, from
    num_steps steps: accepted drafts come from one, what a slow reader gets at once from several.

    Times are on the replica's clock, as `submitted_s` and `done_s` are.
    """

    from_s: float
    to_s: float
    objective_s: float
    num_tokens: int = 1
    num_steps: int = 1


class Explanation(NamedTuple):
    """step: the step with the largest share of the cause; None if no step has any."""

    cause: Cause
    step: int | None


def explain(
    gap: Gap, steps: Sequence[IterationRecord], earlier: Sequence[IterationRecord]
) -> Explanation:
    """The cause of one missed gap.

    steps: the records that ended within the gap; earlier: some before it, to estimate the time of
    decodes without prefill. Both oldest first.
    """
    # Of several steps delivered together, the gap ended with the first.
    steps = steps[: max(0, len(steps) - gap.num_steps + 1)]
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
    """The larger part of a time to first token: "queue" (before its first step) or "prefill"."""
    return "queue" if queued_s > ttft_s / 2 else "prefill"


def _first_after_rebuild(records: Iterable[IterationRecord]) -> IterationRecord | None:
    """The first record after a rebuild: step numbers restart, or the recovery count grows."""
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
    """The time from the end of the previous step to the end of this one, by cause."""
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
    """Busy time of all stages, by durations, because stages may be on nodes with other clocks."""
    return sum(end_s - begin_s for begin_s, end_s in record.stages_s)


def _similar_s(num_decodes: int, records: Sequence[IterationRecord]) -> float | None:
    """Time of a similar step without prefill: the median of those nearest in decodes."""
    alone = [r for r in records if r.stages_s and r.num_decode_tokens and not r.num_prefill_tokens]
    if not alone or not num_decodes:
        return None
    nearest = min(abs(r.num_decode_tokens - num_decodes) for r in alone)
    return median(_stages_s(r) for r in alone if abs(r.num_decode_tokens - num_decodes) == nearest)
