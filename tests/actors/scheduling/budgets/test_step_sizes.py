"""Sizes of steps worth their time, of any profile."""

from __future__ import annotations

import pytest

from actors.scheduling.budgets.step_sizes import StepSizes
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel


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


@pytest.mark.parametrize(
    ("efficiency", "dent", "beyond"), [(0.8, 0.05, False), (1.0, 0.0, False), (1.0, 0.0, True)]
)
def test_sizes_that_share_their_rates_are_those_of_their_own(
    efficiency: float, dent: float, beyond: bool
) -> None:
    profile = CostModel("flat", ((1, 0.001), (256, 0.025), (2048, 0.202)))
    ratios = [1.0 + 0.1 * (length % 3) for length in range(13)]
    usual = StepSizes(profile, 2048, 0.95, ratios=ratios)
    shared = usual.like(efficiency, dent, beyond)
    assert shared._rates is usual._rates
    own = StepSizes(profile, 2048, efficiency, dent, ratios, beyond)
    assert [shared.at_most(n) for n in range(2049)] == [own.at_most(n) for n in range(2049)]
