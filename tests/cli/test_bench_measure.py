"""What the benches read from the times a caller saw."""

from __future__ import annotations

import pytest

from app.bench.load.client import Job, Trace
from app.bench.load.measure import rate_together


def traces(*times_s: list[float]) -> list[Trace]:
    return [Trace(Job(0.0, 8, len(times)), event_times_s=times) for times in times_s]


def test_only_the_time_in_which_all_decode_counts() -> None:
    rate = rate_together(traces([0.0, 0.5, 1.0], [0.5, 0.75, 1.0, 1.5]))
    assert rate == pytest.approx(3 / 0.5)  # 1.0 of the first; 0.75 and 1.0 of the second


@pytest.mark.parametrize("second", [[0.3, 0.4], [0.2], []])
def test_streams_that_never_decode_together_have_no_rate(second: list[float]) -> None:
    assert rate_together(traces([0.1, 0.2], second)) is None
