"""Early tokens buy time for later ones, never more than the smoothness bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.budgets.slack import INITIAL_SHARE, MOST_SHARE, KeptShare, due_after


def test_at_smoothness_one_every_gap_is_bounded() -> None:
    assert due_after(10.1, 10.02, 0.1, 1.0) == pytest.approx(10.12)


def test_early_tokens_bank_time_up_to_the_bound() -> None:
    due_s = due_after(0.1, 0.02, 0.1, 2.0)
    assert due_s == pytest.approx(0.2)  # the schedule: second token at 2 objectives
    for now_s in (0.04, 0.06, 0.08, 0.10):
        due_s = due_after(due_s, now_s, 0.1, 2.0)
    assert due_s == pytest.approx(0.30)  # 5 tokens early, but no gap over 2 objectives


def test_a_stall_is_not_paid_for_by_the_rest() -> None:
    assert due_after(0.1, 5.0, 0.1, 2.0) == pytest.approx(5.1)


@given(st.lists(st.floats(0.0, 3.0), max_size=40), st.floats(1.0, 4.0))
def test_due_times_keep_both_bounds(gaps: list[float], smoothness: float) -> None:
    now_s, due_s = 0.0, 1.0
    for gap in gaps:
        now_s += gap
        due_s = due_after(due_s, now_s, 1.0, smoothness)
        assert now_s + 1.0 - 1e-9 <= due_s <= now_s + smoothness + 1e-9


def test_one_miss_in_a_hundred_and_thirty_leaves_the_share_where_it_is() -> None:
    kept = KeptShare(allowed=0.0075, value=0.9)
    for step in range(1330):
        kept.note(step % 133 != 0, taken=1.1)
    assert kept.value == pytest.approx(0.9, rel=0.01)
    for _ in range(100):
        kept.note(False, taken=1.1)
    assert kept.value == kept.least


def test_misses_lower_the_aim_and_time_raises_it() -> None:
    kept = KeptShare(allowed=0.0075)
    for number in range(20_000):
        kept.note(number % 100 != 0, taken=1.1)  # one in a hundred: more than is allowed
    assert kept.value < 1.02 * kept.least
    for number in range(200_000):
        kept.note(number % 400 != 0, taken=1.1)
    assert kept.value > 0.97


def test_one_bad_second_is_forgiven_and_lasting_misses_are_not() -> None:
    kept = KeptShare(allowed=0.002, forgives=True)
    for _ in range(40):  # forty steps in a row, far over what any share would have saved
        kept.note(False, taken=2.0)
    assert kept.value == INITIAL_SHARE
    for _ in range(40):  # and forty that a smaller share would have saved
        kept.note(False, taken=1.1)
    assert INITIAL_SHARE * (1 - kept.rate) ** 3 <= kept.value < INITIAL_SHARE
    for number in range(20_000):  # one in fifty, of a program that goes on
        kept.note(number % 50 != 0, taken=1.01)
    assert kept.value < 1.02 * kept.least
    num_steps = 0
    while kept.value < INITIAL_SHARE:
        kept.note(True, taken=0.5)
        num_steps += 1
    plain = KeptShare(allowed=0.002, value=kept.least)
    for _ in range(num_steps):
        plain.note(True, taken=0.5)
    assert plain.value < kept.least + (INITIAL_SHARE - kept.least) / 3


@pytest.mark.parametrize(("forgives", "most"), [(True, MOST_SHARE), (False, 1.0)])
def test_after_many_kept_steps_a_part_of_the_objective_is_left(forgives: bool, most: float) -> None:
    kept = KeptShare(allowed=0.0075, forgives=forgives)
    for _ in range(2000):
        kept.note(True, taken=0.5)
    assert kept.value == most


def test_a_kept_share_that_does_not_forgive_counts_every_miss() -> None:
    kept = KeptShare(allowed=0.002)
    for _ in range(5):
        kept.note(False, taken=2.0)
    assert kept.value == pytest.approx(INITIAL_SHARE * (1 - kept.rate) ** 5)


@pytest.mark.parametrize("forgives", [True, False])
def test_what_was_gained_beyond_the_first_share_is_for_a_queue(forgives: bool) -> None:
    kept = KeptShare(allowed=0.002, forgives=forgives)
    for _ in range(5000):
        kept.note(True, taken=0.5)
    assert kept.value == kept.for_queue(1) > 1.05 * INITIAL_SHARE
    assert kept.for_queue(0) == (INITIAL_SHARE if forgives else kept.value)
    for _ in range(500):
        kept.note(False, taken=1.0)
    assert kept.for_queue(0) == kept.for_queue(1) == kept.value == kept.least
