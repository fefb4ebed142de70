"""The drafter of prompt lookup: what followed where the text stood before."""

from __future__ import annotations

from collections.abc import Sequence

from actors.scheduling.speculation.history import History, Reading
from actors.scheduling.speculation.offered import GUESS_MEMORY
from actors.scheduling.speculation.text import Text

_PRIOR = 0.5  # assumed acceptance rate before a request's first draft
_SUFFIX = 32  # tokens that are looked for
_LONG = 8  # tokens of a match in the request itself, beyond which no other text is searched
_MOST_REST = 8  # tokens between searches that find nothing
_AT_ONCE = 64  # tokens of an answer read by one call beside the allowance for prompts


class PromptLookup:
    """Implements `interfaces.Drafter`: guesses what followed the longest end of the text where it
    stood before, in the request or in what was served before.

    Outputs that quote, edit or repeat text continue like their source. A match is followed token by
    token while it is right, which costs one comparison each; once it is wrong, the next is searched
    from the last known token, and where none is found, after 1, 2, 4 and then every 8 more.
    """

    __slots__ = (
        "_history",
        "_known",
        "_num_prompt",
        "_place",
        "_reading",
        "_source",
        "_text",
        "acceptance_rate",
        "rest",
    )

    def __init__(
        self,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        reading: Reading | None = None,
        history: History | None = None,
    ) -> None:
        """output: tokens that were drawn before, which no guess is compared with."""
        self.acceptance_rate = _PRIOR
        self.rest = 0
        self._known: Sequence[int] = (*prompt, *output) if output else prompt
        self._num_prompt = len(prompt)
        self._reading = reading or Reading()
        self._history = history
        self._text = Text(len(self._known))
        # The text that the next token is guessed from, and where it stands in it
        self._source: Text | None = None
        self._place = 0

    def follow(self, output: Sequence[int]) -> bool:
        text = self._text
        known = len(text.tokens)
        if known < len(self._known):
            count = self._reading.take(len(self._known) - known)
            text.append(self._known[known : known + count])
            known += count
            if known < len(self._known):
                return False
            self._search()
        new = output[known - self._num_prompt : known - self._num_prompt + _AT_ONCE]
        if new:
            if self._source is not None:
                self._compare(new)
            text.append(new)
            if self._source is None:
                self._search()
        return known + len(new) == self._num_prompt + len(output)

    def _compare(self, new: Sequence[int]) -> None:
        """Learn from the guesses, up to the first that is wrong."""
        guesses = self._guesses(len(new))
        for token, guess in zip(new, guesses, strict=False):
            self.acceptance_rate *= GUESS_MEMORY
            self.acceptance_rate += (1.0 - GUESS_MEMORY) * (token == guess)
            if token != guess:
                self._source, self.rest = None, 0
                return
        self._place += len(new)
        if len(guesses) < len(new):  # the source ends
            self._source, self.rest = None, 0

    def _search(self) -> None:
        text, history = self._text, self._history
        suffix = text.tokens[-_SUFFIX:]
        place, length = text.find(suffix)
        self._source, self._place = (text, place) if length else (None, 0)
        if history is not None and length < _LONG:
            other, there, longer = history.find(suffix)
            if longer > length:
                self._source, self._place = other, there
        self.rest = 0 if self._source else min(2 * self.rest or 1, _MOST_REST)

    def _guesses(self, most: int) -> Sequence[int]:
        if self._source is None:
            return ()
        tokens = self._source.tokens
        found = tokens[self._place : self._place + most]
        if self._source is self._text:
            period = len(tokens) - self._place  # a repetition continues
            while len(found) < most:
                found.append(found[-period])
        return found

    def draft(self, most: int) -> tuple[int, ...]:
        return tuple(self._guesses(most))
