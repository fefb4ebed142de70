"""Prompt lookup: guesses the tokens that followed the last n-gram's previous occurrence.

Outputs that quote, edit or repeat text of the request continue like their source. A table holds
the last position of each n-gram; a match is followed token by token, so most tokens cost one
comparison and one entry.
"""

from __future__ import annotations

from collections.abc import Sequence

_GRAM = 3  # tokens that must match
_MOST_AT_ONCE = 2048  # tokens taken in by one call: about a millisecond
_PRIOR = 0.5  # assumed acceptance rate before a request's first draft
_MEMORY = 0.9  # weight of the earlier estimate at each further guess


class PromptLookup:
    """Implements `interfaces.Drafter`."""

    __slots__ = ("_at", "_match", "_num_prompt", "_prompt", "_tokens", "acceptance_rate")

    def __init__(self, prompt: Sequence[int]) -> None:
        self.acceptance_rate = _PRIOR
        self._prompt = prompt
        self._num_prompt = len(prompt)
        self._tokens: list[int] = []  # of prompt and output, taken in so far
        self._at: dict[tuple[int, ...], int] = {}  # n-gram -> the position after it
        self._match: int | None = None  # position of the token that should come next

    def follow(self, output: Sequence[int]) -> bool:
        tokens, num_prompt = self._tokens, self._num_prompt
        known = len(tokens)
        if known < num_prompt:
            self._append(self._prompt[known : known + _MOST_AT_ONCE], learns=False)
            known = len(tokens)
            if known < num_prompt:
                return False
        new = output[known - num_prompt : known - num_prompt + _MOST_AT_ONCE]
        self._append(new, learns=True)
        return len(tokens) == num_prompt + len(output)

    def _append(self, new: Sequence[int], learns: bool) -> None:
        tokens, table = self._tokens, self._at
        for token in new:
            match = self._match
            if match is not None:
                is_right = tokens[match] == token
                if learns:
                    self.acceptance_rate *= _MEMORY
                    self.acceptance_rate += (1.0 - _MEMORY) * is_right
                match = match + 1 if is_right else None
            tokens.append(token)
            gram = tuple(tokens[-_GRAM:])
            self._match = table.get(gram) if match is None else match
            if len(gram) == _GRAM:
                table[gram] = len(tokens)

    def draft(self, most: int) -> tuple[int, ...]:
        match, tokens = self._match, self._tokens
        if match is None:
            return ()
        found = tokens[match : match + most]
        period = len(tokens) - match  # a repetition continues
        while len(found) < most:
            found.append(found[-period])
        return tuple(found)
