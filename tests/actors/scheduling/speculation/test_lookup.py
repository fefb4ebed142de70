"""Prompt lookup: drafts are what followed the last tokens before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.speculation.lookup import PromptLookup


def test_lookup_continues_what_stood_there_before() -> None:
    lookup = PromptLookup((1, 2, 3, 4, 5, 6, 7, 1, 2))
    assert lookup.follow([3])
    assert lookup.draft(3) == (4, 5, 6)
    assert lookup.follow([3, 4, 9])
    assert lookup.draft(3) == ()


def test_lookup_goes_on_repeating() -> None:
    lookup = PromptLookup((1, 2, 1, 2, 1))
    assert lookup.follow([])
    assert lookup.draft(5) == (2, 1, 2, 1, 2)


def test_lookup_learns_how_often_it_is_right() -> None:
    prompt = tuple(range(100))
    right, wrong = PromptLookup((*prompt, 0, 1, 2)), PromptLookup((*prompt, 0, 1, 2))
    right.follow(list(range(3, 30)))
    wrong.follow([t for k in range(30) for t in (3 * k, 3 * k + 1, 3 * k + 2, 200 + k)])
    assert right.acceptance_rate > 0.9
    assert wrong.acceptance_rate < 0.5


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 60))
def test_lookup_is_the_same_however_it_is_fed(tokens: list[int], cut: int) -> None:
    at_once, bit_by_bit = PromptLookup(tuple(tokens[:cut])), PromptLookup(tuple(tokens[:cut]))
    output = tokens[cut:]
    at_once.follow(output)
    for end in range(len(output) + 1):
        bit_by_bit.follow(output[:end])
    assert at_once.draft(5) == bit_by_bit.draft(5)
    assert at_once.acceptance_rate == bit_by_bit.acceptance_rate


def test_a_long_prompt_is_read_in_parts() -> None:
    lookup = PromptLookup(tuple(range(5000)))
    assert [lookup.follow([]) for _ in range(3)] == [False, False, True]
