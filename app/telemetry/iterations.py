"""The iteration records of one engine: they explain gaps and give the growth of its counters.

A replica has the records of one engine, a front those of many. They are kept apart, because steps
of another engine do not explain a stream's gap, and every engine has its own counters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from actors.transport.messages import IterationRecord
from app.telemetry.causes import Explanation, Gap, explain

_NUM_RECORDS = 4096  # records kept, enough to cover a gap of seconds
_NUM_EARLIER = 64  # before a gap, for comparison
_FIRST_STEPS = 100  # an engine that is first seen at a later step ran before this front began
_COUNTED = ("num_preemptions", "num_recoveries")


class EngineIterations:
    """The latest records, oldest first, and the causes of gaps among them."""

    def __init__(self) -> None:
        self._records: list[IterationRecord] = []
        self._ends_s: list[float] = []
        self._known: dict[tuple[float, ...], Explanation] = {}
        self._seen = dict.fromkeys(_COUNTED, 0)
        self._seen_step = -1
        self._stage_end_s: list[float] = []

    @property
    def last(self) -> IterationRecord | None:
        """The newest step."""
        return self._records[-1] if self._records else None

    @property
    def last_s(self) -> float:
        """End of the newest step."""
        return self._ends_s[-1] if self._ends_s else 0.0

    def add(self, records: Sequence[IterationRecord]) -> None:
        """Add new records, oldest first."""
        self._records += records
        self._ends_s += [record.done_s for record in records]
        if len(self._records) > _NUM_RECORDS:
            del self._records[: -_NUM_RECORDS // 2], self._ends_s[: -_NUM_RECORDS // 2]
        self._known.clear()

    def forget_before(self, time_s: float) -> None:
        """Drop all records if the last step ended before `time_s`."""
        if self.last_s < time_s:
            self._records, self._ends_s, self._known = [], [], {}

    def covers(self, gap: Gap, start_s: float) -> bool:
        """Whether all steps that ended within the gap are here: a later step is, or the engine has
        become idle since the request began at start_s."""
        if not self._records:
            return False
        last = self._records[-1]
        is_idle = not (last.num_decoding or last.num_prefilling or last.num_waiting)
        return last.done_s >= (start_s if is_idle else gap.to_s)

    def explain(self, gap: Gap) -> Explanation:
        """The cause of a gap; cached, because streams that stall together share it."""
        first = bisect_right(self._ends_s, gap.from_s)
        last = bisect_right(self._ends_s, gap.to_s)
        # Streams of one step get their tokens within about a millisecond.
        outside_s = gap.to_s - (self._ends_s[last - 1] if last > first else gap.from_s)
        key = (first, last, gap.num_steps, gap.objective_s, round(outside_s, 2))
        found = self._known.get(key)
        if found is None:
            earlier = self._records[max(0, first - _NUM_EARLIER) : first]
            found = self._known[key] = explain(gap, self._records[first:last], earlier)
        return found

    def new_counts(self, record: IterationRecord) -> Mapping[str, int]:
        """Growth of the engine's counters since the previous record, by field.

        A new scheduler starts them and its steps at 0 again; the loss of the one before is a
        recovery that neither has counted. What an engine counted before this front began is no
        growth: others have told of it."""
        has_restarted = record.step <= self._seen_step
        counts = {name: getattr(record, name) for name in _COUNTED}
        before = self._seen
        if has_restarted or any(count < before[name] for name, count in counts.items()):
            before = dict.fromkeys(_COUNTED, 0)
        elif self._seen_step < 0 and record.step >= _FIRST_STEPS:
            before = counts
        self._seen, self._seen_step = counts, record.step
        grown = {name: count - before[name] for name, count in counts.items()}
        grown["num_recoveries"] += has_restarted
        return {name: growth for name, growth in grown.items() if growth}

    def bubbles(self, record: IterationRecord) -> Iterator[tuple[int, float]]:
        """(stage, seconds) of bubbles: the time from when the stage was free and the step submitted
        until the stage began the step, spent waiting for another stage."""
        stages = record.stages_s
        if len(stages) > 1 and len(self._stage_end_s) == len(stages):
            for number, (begin_s, _) in enumerate(stages):
                free_s = max(self._stage_end_s[number], record.submitted_s)
                if number and begin_s > free_s:
                    yield number, begin_s - free_s
        self._stage_end_s = [end_s for _, end_s in stages]
