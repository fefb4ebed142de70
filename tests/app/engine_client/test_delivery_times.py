"""What a replica reports of its deliveries: how much a busy moment adds to a gap."""

from __future__ import annotations

import pytest

from app.engine_client.delivery_times import REPORT_EVERY, DeliveryTimes


def told(delays_s: list[float], offset_s: float = 0.0) -> list[float]:
    """The reports; offset_s: between the clocks."""
    times, delays_s = DeliveryTimes(), [delay_s + offset_s for delay_s in delays_s]
    parts = [delays_s[i : i + REPORT_EVERY] for i in range(0, len(delays_s), REPORT_EVERY)]
    reports = map(times.report, parts)
    return [longer_s for longer_s in reports if longer_s is not None]


@pytest.mark.parametrize("offset_s", [0.0, -5000.0])
def test_only_what_lengthens_a_gap_counts(offset_s: float) -> None:
    assert told([0.03] * 200, offset_s) == []
    late = [0.002] * 400
    late[::8] = [0.014] * 50
    assert told(late, offset_s)[0] == pytest.approx(0.012)


def test_there_is_news_or_no_report() -> None:
    busy = ([0.002] * 4 + [0.012]) * 60
    calm = [0.002] * 400
    reports = told(busy + calm)
    assert reports == pytest.approx([0.01, 0.0]), "once each, not every time"
