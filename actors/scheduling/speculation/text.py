"""Tokens in order, in which the longest suffix of another text is found."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

GRAM = 3  # tokens that must match at least
_MOST_TRIES = 8  # latest places of the same n-gram that are compared
_MOST_COMPARED = 32  # tokens of each: of those that match in all of them, the latest is taken
_FEWEST, _MOST = 1 << 8, 1 << 16  # places in the table
# Mixes three tokens; odd, so that all bits count, and small, as Python multiplies slowly beyond 30.
_FIRST, _SECOND, _THIRD = 0x9E3, 0x35D, 0x1F


class Text:
    """Append-only. Every token has the position of the last n-gram before it that hashes alike, so
    the places where an n-gram stood form a chain, the latest first. An array instead of a dict of
    n-grams: ten bytes per token, and equal tokens give equal answers on every machine.
    """

    __slots__ = ("_earlier", "_latest", "_mask", "tokens")

    def __init__(self, expected: int) -> None:
        """expected: tokens; more are slower to find, nothing else."""
        size = _FEWEST
        while size < min(expected, _MOST):
            size *= 2
        self.tokens = array("i")
        self._mask = size - 1
        self._latest = array("i", bytes(4 * size))  # by hash: position after the n-gram; 0: none
        self._earlier = array("i")  # by the position after an n-gram, less one: the one before it

    def append(self, new: Sequence[int]) -> None:
        tokens, latest, mask = self.tokens, self._latest, self._mask
        position = len(tokens)
        first, second = (*(0, 0), *tokens[-2:])[-2:]
        add_earlier = self._earlier.append
        for token in new:
            position += 1
            slot = (first * _FIRST ^ second * _SECOND ^ token * _THIRD) & mask
            add_earlier(latest[slot])
            latest[slot] = position
            first, second = second, token
        tokens.extend(new)

    def find(self, suffix: Sequence[int]) -> tuple[int, int]:
        """The position after the longest end of `suffix` that stands in here with a token after it,
        and its length (at most 32); (0, 0) if that is shorter than an n-gram."""
        tokens, earlier = self.tokens, self._earlier
        if len(suffix) < GRAM or not tokens:
            return 0, 0
        first, second, third = suffix[-3], suffix[-2], suffix[-1]
        place = self._latest[(first * _FIRST ^ second * _SECOND ^ third * _THIRD) & self._mask]
        if place == len(tokens) > 0:  # nothing follows
            place = earlier[place - 1]
        best = longest = tries = 0
        most = min(len(suffix), _MOST_COMPARED)
        while place >= GRAM and tries < _MOST_TRIES:
            length, bound = 0, min(most, place)
            while length < bound and tokens[place - 1 - length] == suffix[-1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
                if length == most:
                    break
            place = earlier[place - 1]
            tries += 1
        return (best, longest) if longest >= GRAM else (0, 0)
