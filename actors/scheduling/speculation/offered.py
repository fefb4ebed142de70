"""Drafts that come with a step's result: of a draft model, or forced by a grammar."""

from __future__ import annotations

from collections.abc import Sequence

GUESS_MEMORY = 0.9  # weight of the earlier acceptance rate at each further guess
# A request whose drafts do not pay is looked at again after so many tokens.
LOOK_EVERY = 16
_OFFER_MEMORY = 0.8


class Offered:
    """Implements `interfaces.Drafter`.

    acceptance_rate: of a guess whose predecessors were right.
    offer_rate: share of the requests for drafts, of late, that brought any.
    asked_in: the step that brings the next drafts, or has brought the last ones; -1: none yet.
    asked_at: output tokens known then.
    """

    __slots__ = (
        "_at",
        "_has_brought",
        "_num_known",
        "_tokens",
        "acceptance_rate",
        "asked_at",
        "asked_in",
        "offer_rate",
    )

    def __init__(self, acceptance_rate: float) -> None:
        self.acceptance_rate = acceptance_rate
        self.offer_rate = 1.0
        self.asked_in = -1
        self.asked_at = 0
        self._has_brought = False
        self._tokens: tuple[int, ...] = ()
        self._at = 0  # output tokens before them
        self._num_known = 0  # output tokens that they have been compared with

    def take(self, tokens: tuple[int, ...], output: Sequence[int]) -> None:
        """Drafts that follow this output."""
        self.follow(output)
        self._tokens, self._at = tokens, len(output)
        self._has_brought = True

    def ask(self, step_id: int) -> None:
        """Note that this step will bring drafts, if there are any."""
        if self.asked_in >= 0:
            self.offer_rate *= _OFFER_MEMORY
            self.offer_rate += (1.0 - _OFFER_MEMORY) * self._has_brought
        self.asked_in, self.asked_at, self._has_brought = step_id, self._num_known, False

    @property
    def rest(self) -> int:
        return 0 if self._tokens else 1

    def follow(self, output: Sequence[int]) -> bool:
        first, self._num_known = self._num_known, len(output)
        guesses = self._tokens[first - self._at :]
        for token, guess in zip(output[first:], guesses, strict=False):
            self.acceptance_rate *= GUESS_MEMORY
            self.acceptance_rate += (1.0 - GUESS_MEMORY) * (token == guess)
            if token != guess:  # those after it were guessed to follow another token
                self._tokens = ()
                break
        return True

    def draft(self, most: int) -> tuple[int, ...]:
        first = self._num_known - self._at
        return self._tokens[first : first + most]
