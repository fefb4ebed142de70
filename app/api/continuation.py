"""One continuation's tokens becoming text: detokenised, cut at stop strings, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.scheduling.plan import TokenLogprobs
from actors.scheduling.request import FinishReason
from app.engine.client import EngineUnavailable, GenerationFailed, TokenChunk
from app.text.processor import TextProcessor
from app.text.stops import StopStrings


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens of one request become text."""

    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    skip_special_tokens: bool = True


@dataclass(slots=True)
class Piece:
    """News of one continuation.

    index: among all continuations of the HTTP request. entries: (log-probabilities, offset of the
    token's text in the continuation) of tokens whose text is now certain.
    """

    index: int
    text: str
    num_tokens: int
    finish_reason: str | None = None
    entries: list[tuple[TokenLogprobs, int]] = field(default_factory=list)


class Continuation:
    """State of one continuation. `take` turns each engine chunk into a Piece."""

    __slots__ = (
        "_detokenizer",
        "_held_entries",
        "_num_chars",
        "_rules",
        "_shown_chars",
        "_stops",
        "finished",
        "index",
        "is_plain",
        "num_tokens",
    )

    def __init__(
        self, index: int, prompt: Sequence[int], rules: TextRules, text: TextProcessor
    ) -> None:
        self.index = index
        self.num_tokens = 0  # as counted in usage: the stop token or string included
        self.finished = False
        self._rules = rules
        self._detokenizer = text.detokenizer(prompt, skip_special_tokens=rules.skip_special_tokens)
        self._stops = StopStrings(rules.stops) if rules.stops else None
        # A plain token is a piece of text and nothing more, which `take_plain` needs.
        self.is_plain = self._stops is None
        self._num_chars = 0  # detokenised so far, held back or not
        self._shown_chars = 0  # given out so far
        self._held_entries: list[tuple[TokenLogprobs, int]] = []

    def take_plain(self, tokens: list[int]) -> str:
        """The text of tokens that come with nothing else."""
        self.num_tokens += len(tokens)
        return self._detokenizer.push(tokens)

    def take(self, chunk: TokenChunk) -> Piece:
        """The piece of text that this chunk makes certain; raises EngineError if it failed."""
        reason = chunk.finish_reason
        if reason is FinishReason.ERROR:
            raise GenerationFailed("The generation failed in the engine.")
        if reason is FinishReason.ABORT:
            raise EngineUnavailable("The generation was ended by the server.")
        if self._stops is None and not chunk.logprobs and reason is None:
            return Piece(self.index, self.take_plain(chunk.tokens), len(chunk.tokens))
        return self._take_carefully(chunk)

    def _take_carefully(self, chunk: TokenChunk) -> Piece:
        """Token by token, so that counts, stop strings and log-probabilities are exact."""
        reason = chunk.finish_reason
        tokens = chunk.tokens
        ends_by_token = (
            reason is FinishReason.STOP
            and bool(tokens)
            and tokens[-1] in self._rules.stop_token_ids
        )
        num_shown = len(tokens) - ends_by_token
        shown: list[str] = []
        num_taken = 0
        for i in range(num_shown):
            if chunk.logprobs:
                self._held_entries.append((chunk.logprobs[i], self._num_chars))
            num_taken += 1
            if self._feed(self._detokenizer.push(tokens[i : i + 1]), shown):
                return self._piece("".join(shown), num_taken, "stop")
        num_taken += ends_by_token
        if reason is not None:
            if self._feed(self._detokenizer.flush(), shown):
                return self._piece("".join(shown), num_taken, "stop")
            if self._stops is not None:
                shown.append(self._stops.finish())
        return self._piece("".join(shown), num_taken, None if reason is None else reason.value)

    def _feed(self, text: str, shown: list[str]) -> bool:
        """Add detokenised text; True when a stop string is complete."""
        self._num_chars += len(text)
        if self._stops is None:
            shown.append(text)
            return False
        shown.append(self._stops.push(text))
        return self._stops.found is not None

    def _piece(self, text: str, num_tokens: int, reason: str | None) -> Piece:
        self.num_tokens += num_tokens
        self._shown_chars += len(text)
        entries = self._held_entries
        if self._shown_chars != self._num_chars:  # text is held back, or was cut off
            entries = [entry for entry in entries if entry[1] < self._shown_chars]
        self._held_entries = self._held_entries[len(entries) :]
        if reason is not None:
            self.finished, self.is_plain = True, False
        return Piece(self.index, text, num_tokens, reason, entries)
