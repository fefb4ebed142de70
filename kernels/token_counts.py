"""How often tokens stand in a request's text, kept from draw to draw.

Penalties need the distinct tokens of the whole text before each draw. To count them anew takes a
sort of the text; between two draws it grows by a token, or loses drafts that were rejected.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LEAST_ROOM = 256


class TokenCounts:
    """Counts of one text, its prompt and output. Tokens that are no longer in it may keep a place,
    with counts of 0."""

    def __init__(self) -> None:
        self._text: NDArray[np.int32] = np.zeros(0, np.int32)
        self._num_tokens = 0
        self._num_prompt = 0
        self._places: dict[int, int] = {}
        self._counts: NDArray[np.int32] = np.zeros((3, 0), np.int32)  # token, in all, in the output

    @property
    def ids(self) -> NDArray[np.int32]:
        """Distinct tokens, in no order."""
        return self._counts[0, : len(self._places)]

    @property
    def totals(self) -> NDArray[np.int32]:
        """How often each of `ids` stands in prompt and output."""
        return self._counts[1, : len(self._places)]

    @property
    def in_output(self) -> NDArray[np.int32]:
        """How often each of `ids` stands in the output."""
        return self._counts[2, : len(self._places)]

    def place(self, token: int) -> int | None:
        """Where a token stands in `ids`."""
        return self._places.get(token)

    def advance(self, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> None:
        """Bring the counts to this text, by what differs from the last one behind the beginning
        that they share. A prompt of another length begins anew."""
        first = len(prompt)
        if first != self._num_prompt or not np.array_equal(self._text[:first], prompt):
            self._begin(prompt)
        old = self._text[first : self._num_tokens]
        kept = min(len(old), len(output))
        differs = old[:kept] != output[:kept]
        if differs.any():
            kept = int(differs.argmax())
        for token in old[kept:].tolist():
            self._counts[1:, self._places[token]] -= 1
        for token in output[kept:].tolist():
            place = self._places.get(token)
            if place is None:
                place = self._add(token)
            self._counts[1:, place] += 1
        self._put(output[kept:], first + kept)

    def _begin(self, prompt: NDArray[np.int32]) -> None:
        ids, totals = np.unique(prompt, return_counts=True)
        self._places = {token: place for place, token in enumerate(ids.tolist())}
        self._counts = np.zeros((3, len(ids) + _LEAST_ROOM), np.int32)
        self._counts[0, : len(ids)], self._counts[1, : len(ids)] = ids, totals
        self._num_prompt = len(prompt)
        self._put(prompt, 0)

    def _add(self, token: int) -> int:
        place = len(self._places)
        if place == self._counts.shape[1]:
            self._counts = _with_room(self._counts, place + 1)
        self._places[token] = place
        self._counts[:, place] = token, 0, 0
        return place

    def _put(self, tokens: NDArray[np.int32], first: int) -> None:
        self._num_tokens = first + len(tokens)
        if self._num_tokens > len(self._text):
            self._text = _with_room(self._text, self._num_tokens)
        self._text[first : self._num_tokens] = tokens


def _with_room(values: NDArray[np.int32], needed: int) -> NDArray[np.int32]:
    """A copy with twice the room that is needed in its last dimension."""
    larger = np.zeros((*values.shape[:-1], max(2 * needed, _LEAST_ROOM)), np.int32)
    larger[..., : values.shape[-1]] = values
    return larger
