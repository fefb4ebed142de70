"""Drafts that the last stage offers with a step's result, by a draft model that runs there."""

from __future__ import annotations

from collections.abc import Sequence

_MEMORY = 0.9  # weight of the earlier estimate at each further guess


class Offered:
    """Implements `interfaces.Drafter`.

    acceptance_rate: of a guess whose predecessors were right.
    asked_in: the step that brings the next drafts, or has brought the last ones; -1: none yet.
    """

    __slots__ = ("_at", "_num_known", "_tokens", "acceptance_rate", "asked_in")

    def __init__(self, acceptance_rate: float) -> None:
        self.acceptance_rate = acceptance_rate
        self.asked_in = -1
        self._tokens: tuple[int, ...] = ()
        self._at = 0  # output tokens before them
        self._num_known = 0  # output tokens that they have been compared with

    def take(self, tokens: tuple[int, ...], output: Sequence[int]) -> None:
        """Drafts that follow this output."""
        self.follow(output)
        self._tokens, self._at = tokens, len(output)

    def follow(self, output: Sequence[int]) -> bool:
        first, self._num_known = self._num_known, len(output)
        guesses = self._tokens[first - self._at :]
        for token, guess in zip(output[first:], guesses, strict=False):
            self.acceptance_rate *= _MEMORY
            self.acceptance_rate += (1.0 - _MEMORY) * (token == guess)
            if token != guess:  # those after it were guessed to follow another token
                self._tokens = ()
                break
        return True

    def draft(self, most: int) -> tuple[int, ...]:
        first = self._num_known - self._at
        return self._tokens[first : first + most]
