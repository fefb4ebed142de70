"""The counters of one engine, of which each scheduler starts at 0."""

from __future__ import annotations

import pytest

from actors.transport.messages import IterationRecord
from app.telemetry.iterations import EngineIterations


def record(step: int, preemptions: int, recoveries: int) -> IterationRecord:
    return IterationRecord(
        step, 1.0, 2.0, None, 8, 0, 8, ((1.0, 2.0),), 8, 0, 0, 9, preemptions, recoveries, 512
    )


@pytest.mark.parametrize(
    ("seen", "now", "grown"),
    [
        ((50, 10, 1), (51, 10, 1), (0, 0)),
        ((50, 10, 1), (51, 12, 2), (2, 1)),
        ((50, 10, 1), (1, 4, 0), (4, 1)),  # the lost scheduler is a recovery
        ((50, 10, 1), (1, 14, 3), (14, 4)),  # none has fallen, but all belong to a new scheduler
        ((50, 10, 1), (60, 4, 0), (4, 0)),  # its first records have not been seen
        ((1, 0, 0), (1, 0, 0), (0, 1)),
    ],
)
def test_growth_goes_on_with_a_new_scheduler(
    seen: tuple[int, int, int], now: tuple[int, int, int], grown: tuple[int, int]
) -> None:
    iterations = EngineIterations()
    first = iterations.new_counts(record(*seen))
    assert (first.get("num_preemptions", 0), first.get("num_recoveries", 0)) == seen[1:]
    for expected in (grown, (0, 0)):
        counts = iterations.new_counts(record(*now))
        assert (counts.get("num_preemptions", 0), counts.get("num_recoveries", 0)) == expected
        now = (now[0] + 1, *now[1:])


def test_what_an_engine_counted_before_a_front_began_is_no_growth() -> None:
    """Each update of the fronts would count the past of the whole fleet again."""
    iterations = EngineIterations()
    assert iterations.new_counts(record(70_000, 50, 5)) == {}
    assert iterations.new_counts(record(70_001, 51, 5)) == {"num_preemptions": 1}
    assert iterations.new_counts(record(0, 0, 0)) == {"num_recoveries": 1}
