"""What a grammar forces: the stage that draws knows it, and says it with each result.

A name in a schema, a bracket, a fixed word: the grammar lets nothing else follow. The tokens that
its text is cut into are drafts at no cost of a model; acceptance is by the draw, as always.
"""

from __future__ import annotations

from collections.abc import Sequence

_PRIOR = 0.9
_MEMORY = 0.9  # weight of what was learnt before, at each further guess


class Forced:
    """Implements `interfaces.Drafter`, of a request with a grammar."""

    __slots__ = ("_at", "_known", "_tokens", "chance")

    def __init__(self) -> None:
        self.chance = _PRIOR
        self._tokens: tuple[int, ...] = ()
        self._at = 0  # how long the output is that they follow
        self._known = 0

    def offer(self, tokens: tuple[int, ...], output: Sequence[int]) -> None:
        """Tokens that the grammar lets follow this output."""
        self.follow(output)
        self._tokens, self._at = tokens, len(output)

    def follow(self, output: Sequence[int]) -> bool:
        guesses = self._tokens[self._known - self._at :]
        for drawn, guess in zip(output[self._known :], guesses, strict=False):
            self.chance = _MEMORY * self.chance + (1.0 - _MEMORY) * (drawn == guess)
        self._known = len(output)
        return True

    def draft(self, most: int) -> tuple[int, ...]:
        return self._tokens[:most] if self._at == self._known else ()
