"""Slack: early tokens buy time, never more than the smoothness bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.budgets.objective import TokenClock, due_after


def test_at_smoothness_one_every_gap_is_bounded() -> None:
    clock = TokenClock.start(10.0, 0.1)
    clock.token(10.02)
    assert clock.due_s == pytest.approx(10.12)
    assert clock.slack_s(10.05) == pytest.approx(0.07)


def test_early_tokens_bank_time_up_to_the_bound() -> None:
    clock = TokenClock.start(0.0, 0.1, smoothness=2.0)
    clock.token(0.02)
    assert clock.due_s == pytest.approx(0.2)  # the schedule: second token at 2 objectives
    for now_s in (0.04, 0.06, 0.08, 0.10):
        clock.token(now_s)
    assert clock.due_s == pytest.approx(0.30)  # 5 tokens early, but no gap over 2 objectives


def test_a_stall_is_not_paid_for_by_the_rest() -> None:
    clock = TokenClock.start(0.0, 0.1, smoothness=2.0)
    clock.token(5.0)
    assert clock.due_s == pytest.approx(5.1)


@given(st.lists(st.floats(0.0, 3.0), max_size=40), st.floats(1.0, 4.0))
def test_due_times_keep_both_bounds(gaps: list[float], smoothness: float) -> None:
    clock, now_s = TokenClock.start(0.0, 1.0, smoothness), 0.0
    for gap in gaps:
        now_s += gap
        expected = due_after(clock.due_s, now_s, 1.0, smoothness)
        clock.token(now_s)
        assert clock.due_s == expected
        assert now_s + 1.0 - 1e-9 <= clock.due_s <= now_s + smoothness + 1e-9


@pytest.mark.parametrize(("tbt_s", "smoothness"), [(0.0, 1.0), (-1.0, 1.0), (0.1, 0.5)])
def test_impossible_clocks_are_refused(tbt_s: float, smoothness: float) -> None:
    with pytest.raises(ValueError):
        TokenClock.start(0.0, tbt_s, smoothness)
