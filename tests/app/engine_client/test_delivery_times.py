"""What a replica reports of its deliveries: how much a busy moment adds to a gap."""

from __future__ import annotations

import pytest

from app.engine_client.delivery_times import REPORT_EVERY, DeliveryTimes


def told(delays_s: list[float], offset_s: float = 0.0) -> list[float]:
    """The reports; offset_s: between the clocks."""
    times, delays_s = DeliveryTimes(), [delay_s + offset_s for delay_s in delays_s]
    parts = [delays_s[i : i + REPORT_EVERY] for i in range(0, len(delays_s), REPORT_EVERY)]
    return [times.report(part) for part in parts]


@pytest.mark.parametrize("offset_s", [0.0, -5000.0])
def test_only_what_lengthens_a_gap_counts(offset_s: float) -> None:
    assert told([0.03] * 200, offset_s) == pytest.approx([0.0] * 7)
    late = [0.002] * 400
    late[::8] = [0.014] * 50
    assert told(late, offset_s)[1:] == pytest.approx([0.012] * 12)


def test_a_busy_time_is_forgotten() -> None:
    reports = told(([0.002] * 4 + [0.012]) * 60 + [0.002] * 400)
    assert max(reports) == pytest.approx(0.01)
    assert reports[-1] == pytest.approx(0.0)


def test_one_late_token_is_no_news() -> None:
    assert told([0.002] * 100 + [0.5] + [0.002] * 100) == pytest.approx([0.0] * 7)
