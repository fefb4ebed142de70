"""The likeliest drafts come first, and as many as raise the tokens per second."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.plan import StepShape
from actors.scheduling.speculation.choice import (
    LEAST_CHANCE,
    Wish,
    best_number,
    choose,
    least_rate,
    likeliest,
)
from tests.actors.scheduling.speculation.costs import Costs

RATES = st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 8)), max_size=12)


@given(RATES, st.integers(0, 60))
def test_the_likeliest_come_first(wanted: list[tuple[float, int]], most: int) -> None:
    drafts = likeliest(wanted, most)
    chances = [-chance for chance, _, _ in drafts]
    assert chances == sorted(chances, reverse=True)
    depths = [0] * len(wanted)
    for chance, depth, index in drafts:  # never one whose predecessor is not drafted
        assert depth == depths[index] < wanted[index][1]
        assert -chance == pytest.approx(wanted[index][0] ** (depth + 1))
        depths[index] += 1
    every = [r ** (k + 1) for r, count in wanted for k in range(count)]
    num_worth = sum(chance >= LEAST_CHANCE * (1 + 1e-9) for chance in every)
    assert len(drafts) >= min(most, num_worth)


def test_tight_room_goes_to_the_likelier_stream() -> None:
    wishes = [Wish(10, 0.3, 8), Wish(10, 0.9, 8)]
    assert choose(None, StepShape(2, 22), wishes, 4) == [0, 4]
    assert choose(None, StepShape(2, 22), wishes[::-1], 4) == [4, 0]


def test_equal_streams_share_in_batch_order() -> None:
    wishes = [Wish(10, 0.9, 8)] * 3
    assert choose(None, StepShape(3, 33), wishes, 4) == [2, 1, 1]


def test_a_poor_stream_takes_nothing_from_a_good_one() -> None:
    """Four more tokens are free behind the four of the decodes, what follows costs its time."""
    wishes = [Wish(10, 0.3, 8), Wish(10, 0.98, 8), Wish(10, 0.3, 8), Wish(10, 0.3, 8)]
    counts = choose(Costs(8), StepShape(4, 44), wishes, 100)
    assert counts[1] >= 4
    assert counts == [0, counts[1], 0, 0]


def test_drafts_that_do_not_raise_the_rate_enough_are_none() -> None:
    wishes = [Wish(10, 0.95, 8)] * 4
    assert choose(Costs(1), StepShape(4, 44), wishes, 100) == [0] * 4
    assert sum(choose(Costs(12), StepShape(4, 44), wishes, 100)) == 8


def test_passes_of_a_draft_model_count_in_the_time() -> None:
    wishes = [Wish(10, 0.95, 8)]
    free, dear = (choose(Costs(16), StepShape(1, 11), wishes, 9, s) for s in (0.0, 0.016))
    assert free == [8]
    assert dear == [0]


def test_tokens_of_prompts_count_like_those_of_decodes() -> None:
    """Beside a chunk that computes a token per millisecond, a draft of that length is not worth it
    unless it is certain; beside one that is too small to fill the step, it is free."""
    wishes = [Wish(10, 0.9, 8)] * 2
    assert choose(Costs(32), StepShape(2, 22, ((0, 40),)), wishes, 99) == [0, 0]
    assert choose(Costs(32), StepShape(2, 22, ((0, 10),)), wishes, 99) == [8, 8]


def test_what_a_wrong_draft_costs_where_its_slice_is_computed_again() -> None:
    """Four tokens are free; of two drafts of this rate, three in four slices have a wrong one."""
    wishes = [Wish(10, 0.5, 2)]
    assert choose(Costs(2), StepShape(1, 11), wishes, 9) == [1]
    assert choose(Costs(2), StepShape(1, 11), wishes, 9, goes_back=True) == [1]
    assert choose(Costs(1), StepShape(1, 11), [Wish(10, 0.97, 2)], 9, goes_back=True) == [0]
    assert choose(Costs(4), StepShape(4, 44), wishes, 9) == choose(
        Costs(4), StepShape(4, 44), wishes, 9, goes_back=True
    )


@dataclass(frozen=True)
class Noting(Costs):
    asked: list[StepShape] = field(default_factory=list)

    def step_s(self, shape: StepShape) -> float:
        self.asked.append(shape)
        return super().step_s(shape)


def test_drafts_of_a_slice_that_computes_tokens_again() -> None:
    """Its own time is spent with drafts or without, and what it computes again is no gain."""
    costs, chunk = Noting(4), (20, 3)
    shape = StepShape(prefills=((10, 4),), num_drafted=1)
    assert choose(costs, shape, [Wish(10, 0.97, 4, 4)], 9, goes_back=True) == [4]
    assert costs.asked[0] == StepShape(1, 14)
    assert StepShape(prefills=((10, 8),), num_drafted=1) in costs.asked
    # Twelve tokens instead of one that would take as long as four: soon, rather than once more.
    long = StepShape(prefills=((10, 12), chunk), num_drafted=1)
    assert choose(Costs(4), long, [Wish(10, 0.6, 1, 12)], 9, goes_back=True) == [0]
    assert choose(Costs(40), long, [Wish(10, 0.6, 1, 12)], 9, goes_back=True) == [1]
    # What it computes again takes most of the step, and a draft little more.
    alone = StepShape(prefills=((10, 12),), num_drafted=1)
    assert choose(Costs(1, more=4), alone, [Wish(10, 0.97, 1, 12)], 9, goes_back=True) == [1]


def test_a_step_is_planned_late_only_for_a_share_of_all_its_decodes() -> None:
    """A twentieth of eight: drafts that cost nothing must bring so much together."""
    for rate, counts in ((0.3, [0]), (0.5, [1])):
        assert choose(Costs(64), StepShape(8, 88), [Wish(10, rate, 1)], 9) == counts


@dataclass(frozen=True)
class Peak:
    """A value that rises up to `at` and falls after it."""

    at: int

    def __call__(self, number: int) -> float:
        return -float(abs(number - self.at))


@given(st.integers(1, 2000), st.data())
def test_the_best_number_is_found_within_a_quarter(most: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, most))
    asked: list[int] = []

    def value(number: int) -> float:
        assert 1 <= number <= most
        asked.append(number)
        return Peak(at)(number)

    number, found = best_number(most, value)
    assert found == Peak(at)(number)
    assert abs(number - at) <= max(1, at / 4)
    assert len(asked) <= most.bit_length() + 5


@given(st.floats(0.01, 7.9), st.integers(1, 8))
def test_the_least_rate_brings_the_gain(gain: float, most: int) -> None:
    rate = least_rate(gain, most)
    if gain >= most:
        assert rate == 1.0
    else:
        brings = sum(rate**k for k in range(1, most + 1))
        assert brings == pytest.approx(gain, abs=0.02)
