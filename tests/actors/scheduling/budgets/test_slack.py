"""Early tokens buy time for later ones, never more than the smoothness bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.budgets.slack import KeptShare, due_after
from actors.scheduling.budgets.step_sizes import StepSizes
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel


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
        kept.note(step % 133 != 0)
    assert kept.value == pytest.approx(0.9, rel=0.01)
    for _ in range(100):
        kept.note(False)
    assert kept.value == kept.least


@pytest.mark.parametrize("knots", [((1, 0.0), (64, 0.0)), ((1, 0.0), (16, 0.0), (64, 0.003))])
def test_a_fit_that_says_no_time_still_gives_step_sizes(
    knots: tuple[tuple[int, float], ...],
) -> None:
    """Tiny models on a busy machine are fitted like that."""
    sizes = StepSizes(CostModel("noise", knots), 64, 0.95)
    found = [sizes.at_most(n) for n in range(65)]
    assert all(0 < size <= n for n, size in enumerate(found) if n)
    assert 0 < sizes.beside(Mix(num_decodes=4), 0.9) <= 64


def test_time_that_every_step_takes_makes_longer_ones_worth_it() -> None:
    """256 tokens have the best rate alone, and share too little of 20 ms."""
    profile = CostModel("flat", ((1, 0.001), (256, 0.025), (2048, 0.202)))
    decodes = Mix(num_decodes=8)
    capped = StepSizes(profile, 2048, 1.0, 0.0)
    longer = StepSizes(profile, 2048, 1.0, 0.0, beyond=True)
    assert longer.beside(decodes, 0.95, outside_s=0.0) <= 256
    assert capped.beside(decodes, 0.95, outside_s=0.02) <= 256
    chosen = longer.beside(decodes, 0.95, outside_s=0.02)
    assert 1024 < chosen <= 2048
    assert longer.at_most(chosen) == chosen
    assert all(0 < longer.at_most(n) <= n for n in range(1, 2049))
