"""The longest suffix is found, as a search over the whole text finds it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.speculation.text import GRAM, Text


def longest(tokens: list[int], suffix: list[int]) -> int:
    """Length of the longest end of `suffix` that has a successor in `tokens`."""
    for length in range(len(suffix), GRAM - 1, -1):
        end = suffix[-length:]
        if any(tokens[i : i + length] == end for i in range(len(tokens) - length)):
            return length
    return 0


@given(
    st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 30), max_size=80),
    st.integers(0, 80),
    st.lists(st.integers(0, 30), max_size=12),
    st.integers(0, 2000),
)
def test_a_match_is_one(tokens: list[int], at: int, tail: list[int], expected: int) -> None:
    text = Text(expected)
    text.append(tokens[: len(tokens) // 2])
    text.append(tokens[len(tokens) // 2 :])
    suffix = [*tokens[:at][-20:], *tail][-20:]
    place, length = text.find(suffix)
    assert bool(length) == bool(longest(tokens, suffix))
    if length:
        assert length >= GRAM
        assert GRAM <= place < len(tokens)
        assert tokens[place - length : place] == suffix[-length:]


@given(st.lists(st.integers(0, 9), min_size=4, max_size=60))
def test_the_longest_of_few_places_is_found(tokens: list[int]) -> None:
    text = Text(len(tokens))
    text.append(tokens)
    suffix = tokens[-8:]
    num_places = sum(tokens[i : i + 3] == suffix[-3:] for i in range(len(tokens) - 2))
    _, length = text.find(suffix)
    assert num_places > 8 or length == longest(tokens, suffix)


def test_of_equal_matches_the_latest_is_taken() -> None:
    text = Text(10)
    text.append([1, 2, 3, 4, 1, 2, 3, 5])
    assert text.find([1, 2, 3]) == (7, 3)


def test_a_token_takes_ten_bytes_or_so() -> None:
    text = Text(1 << 17)
    text.append(range(1 << 17))
    arrays = (text.tokens, text._earlier, text._latest)
    assert sum(len(a) * a.itemsize for a in arrays) <= 10 << 17
