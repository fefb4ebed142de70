"""Drafts of simulated requests: no text is guessed, a draft is right with a given probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.scheduling.speculation.offered import GUESS_MEMORY
from actors.scheduling.state import RequestState

_PRIOR = 0.5  # acceptance rate assumed before a request's first draft, as of prompt lookup
_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Acceptance:
    """probability: that a draft is right whose predecessors are. A position of a request is always
    guessed alike: on every engine, and however many drafts come before it."""

    probability: float
    seed: int = 0

    def is_right(self, request_id: int, position: int) -> bool:
        mixed = (request_id * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9) & _BITS
        mixed = ((mixed ^ mixed >> 30 ^ self.seed) * 0x94D049BB133111EB) & _BITS
        mixed = ((mixed ^ mixed >> 27) * 0xBF58476D1CE4E5B9) & _BITS
        return (mixed ^ mixed >> 31) < self.probability * 2.0**64

    def num_right(self, request_id: int, position: int, count: int) -> int:
        """Right drafts out of `count`, the first of which guesses the token at this position."""
        for num in range(count):
            if not self.is_right(request_id, position + num):
                return num
        return count

    def drafter(self, state: RequestState) -> ModeledDrafter:
        return ModeledDrafter(self, state.request_id, state.num_prompt_tokens)


class ModeledDrafter:
    """Implements `interfaces.Drafter`: always has drafts, blank tokens; learns like prompt lookup
    how often they are right."""

    __slots__ = ("_acceptance", "_known", "_num_prompt", "_request_id", "acceptance_rate")
    rest = 0

    def __init__(self, acceptance: Acceptance, request_id: int, num_prompt: int) -> None:
        self.acceptance_rate = _PRIOR
        self._acceptance = acceptance
        self._request_id, self._num_prompt = request_id, num_prompt
        self._known = 0

    def follow(self, output: Sequence[int]) -> bool:
        is_right, first = self._acceptance.is_right, self._num_prompt
        for position in range(first + self._known, first + len(output)):
            self.acceptance_rate *= GUESS_MEMORY
            self.acceptance_rate += (1.0 - GUESS_MEMORY) * is_right(self._request_id, position)
        self._known = len(output)
        return True

    def draft(self, most: int) -> tuple[int, ...]:
        return (0,) * most
