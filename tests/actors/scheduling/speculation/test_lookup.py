"""Prompt lookup: what followed where the text stood before, and how often that was right."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.speculation.history import AT_ONCE, History, Reading
from actors.scheduling.speculation.lookup import PromptLookup


def test_it_continues_what_stood_there_before() -> None:
    lookup = PromptLookup((1, 2, 3, 4, 5, 6, 7, 1, 2))
    assert lookup.follow([3])
    assert lookup.draft(3) == (4, 5, 6)
    assert lookup.follow([3, 4, 9])
    assert lookup.draft(3) == ()


def test_the_longest_match_wins_over_the_latest() -> None:
    lookup = PromptLookup((7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 7, 1, 2))
    lookup.follow([3])
    assert lookup.draft(1) == (50,)


def test_it_goes_on_repeating() -> None:
    lookup = PromptLookup((1, 2, 1, 2, 1))
    assert lookup.follow([])
    assert lookup.draft(5) == (2, 1, 2, 1, 2)


def test_it_learns_how_often_it_is_right() -> None:
    prompt = tuple(range(100))
    right, wrong = PromptLookup((*prompt, 0, 1, 2)), PromptLookup((*prompt, 0, 1, 2))
    right.follow(list(range(3, 30)))
    output = [t for k in range(16) for t in (3 * k, 3 * k + 1, 3 * k + 2, 200 + k)]
    for end in range(len(output)):
        wrong.follow(output[:end])
    assert right.acceptance_rate > 0.9
    assert wrong.acceptance_rate < 0.5


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 60), st.integers(1, 9))
def test_what_it_guesses_has_stood_there(tokens: list[int], cut: int, most: int) -> None:
    lookup = PromptLookup(tuple(tokens[:cut]))
    output = tokens[cut:]
    for end in range(len(output) + 1):
        assert lookup.follow(output[:end])
        known = tokens[: cut + end]
        drafts = lookup.draft(most)
        assert len(drafts) in (0, most)
        text = [*known, *drafts]
        followers = {text[i + 3] for i in range(len(known) - 3) if text[i : i + 3] == known[-3:]}
        assert bool(drafts) == bool(followers)
        assert not drafts or drafts[0] in followers


def test_other_texts_are_guessed_from_where_they_match_longer() -> None:
    history = History()
    history.add((9, 4, 5, 6, 7, 8))
    history.read(Reading())
    lookup = PromptLookup((4, 5, 6, 1, 2, 9, 4, 5), (), Reading(), history)
    lookup.follow([6])
    assert lookup.draft(9) == (7, 8)  # no further than that text goes
    lookup.follow([6, 7, 8])
    assert lookup.draft(9) == ()


def test_long_prompts_share_what_is_read_in_one_plan() -> None:
    """However many begin to decode at once."""
    reading = Reading()
    lookups = [PromptLookup(tuple(range(2000)), (), reading) for _ in range(3)]
    assert [lookup.follow([]) for lookup in lookups] == [True, False, False]
    assert reading.left == 0
    reading.left = AT_ONCE
    assert [lookup.follow([]) for lookup in lookups] == [True, True, False]


def test_a_long_prompt_is_read_in_parts() -> None:
    reading = Reading()
    lookup, is_whole = PromptLookup(tuple(range(5000)), (), reading), []
    for _ in range(3):
        is_whole.append(lookup.follow([]))
        reading.left = AT_ONCE
    assert is_whole == [False, False, True]


def test_tokens_from_before_a_failure_are_read_like_a_prompt() -> None:
    output = tuple(range(10, 90))
    lookup = PromptLookup((1, 2, 3), output)
    assert lookup.follow(output)
    assert lookup.acceptance_rate == 0.5
    assert lookup.follow([*output, 10, 11, 12])
    assert lookup.draft(2) == (13, 14)


def test_text_that_is_new_is_searched_ever_more_rarely_until_it_repeats() -> None:
    lookup, output, rests = PromptLookup(tuple(range(100, 120))), list[int](), list[int]()
    for token in range(6):
        output.append(token)
        lookup.follow(output)
        rests.append(lookup.rest)
    assert rests == [2, 4, 8, 8, 8, 8]
    lookup.follow([*output, 0, 1, 2])
    assert (lookup.rest, lookup.draft(2)) == (0, (3, 4))
    lookup.follow([*output, 0, 1, 2, 99])  # wrong: the next is looked for at once
    assert (lookup.rest, lookup.draft(1)) == (1, ())
