"""Tokens to text as they arrive.

A character split over tokens is held back until it is whole, and so is a possible stop string.

Feeding the tokens in any grouping gives the same text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from actors.scheduling.plan import TokenLogprobs
from actors.scheduling.request import FinishReason
from app.engine_client.client import EngineUnavailable, GenerationFailed, TokenChunk
from app.text.stops import StopStrings

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")

# A character has at most four bytes, so with one token per byte no honest text stays undecided
# for longer; what is still broken then is broken for good and is shown as U+FFFD.
_MAX_HELD_TOKENS = 6
_CONTEXT_TOKENS = 5  # tokens of the prompt by which a decoder sees how the continuation begins


class Detokenizer(Protocol):
    def push(self, tokens: Sequence[int]) -> str:
        """The text that became certain with these tokens; "" while a character is unfinished."""
        ...

    def flush(self) -> str:
        """The text held back; bytes that form no character become U+FFFD."""
        ...


class TableDetokenizer:
    """Detokenizes by table look-up: well under a microsecond per token.

    table: bytes of every token id, empty for tokens that are not shown.
    """

    __slots__ = ("_decoder", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decoder = _Utf8Decoder("replace")

    def push(self, tokens: Sequence[int]) -> str:
        table, decoder = self._table, self._decoder
        try:
            if len(tokens) == 1:
                raw = table[tokens[0]]
                if raw.isascii() and not decoder.buffer:  # as most are: no state to keep
                    return raw.decode("ascii")
                return decoder.decode(raw)
            return decoder.decode(b"".join([table[token] for token in tokens]))
        except IndexError:  # models pad their vocabulary beyond the tokenizer's
            known = [table[token] for token in tokens if token < len(table)]
            return decoder.decode(b"".join(known))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class PrefixDetokenizer:
    """Detokenizes with any tokenizer, by decoding a short window twice.

    The text of the window with the new tokens, less the text of the window without them, is what
    is new; the window moves on whenever it ends in a whole character.
    """

    __slots__ = ("_decode", "_read", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._read = len(self._window)  # window[:_read] has been shown

    def push(self, tokens: Sequence[int]) -> str:
        return "".join([self._push_one(token) for token in tokens])

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        if len(self._window) - self._read < _MAX_HELD_TOKENS:
            return self._advance(hold=True)
        return self._advance(hold=False)

    def _advance(self, *, hold: bool) -> str:
        before = self._decode(self._window[: self._read])
        after = self._decode(self._window)
        if hold and (after.endswith("\ufffd") or len(after) < len(before)):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return after[len(before) :]

    def flush(self) -> str:
        return self._advance(hold=False) if len(self._window) > self._read else ""


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens of one request become text."""

    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    skip_special_tokens: bool = True
    shown_special: frozenset[str] = frozenset()  # special tokens that are not skipped even so
    by_token: bool = False  # deltas also carry each token's own text
    min_tokens: int = 0  # stop strings count from the token behind these, as in vLLM


@dataclass(slots=True)
class TextDelta:
    """New text and tokens of one continuation.

    index: among all continuations of the HTTP request. entries: (log-probabilities, offset of the
    token's text in the continuation) of tokens whose text is now certain. pieces: of each shown
    token; None where all text is one token's or that was not asked for. rest: the end of the text
    that is in no piece: what was held back until the continuation ended. num_steps: of the engine,
    that its tokens come from.
    """

    index: int
    text: str
    num_tokens: int
    finish_reason: str | None = None
    entries: list[tuple[TokenLogprobs, int]] = field(default_factory=list)
    pieces: Sequence[str] | None = None
    rest: str = ""
    num_steps: int = 1


def is_ended_by_token(chunk: TokenChunk, stop_token_ids: Collection[int]) -> bool:
    """Whether a chunk's last token is a stop token, which is no part of the text."""
    ends = chunk.finish_reason is FinishReason.STOP and bool(chunk.tokens)
    return ends and chunk.tokens[-1] in stop_token_ids


class TextStream:
    """One continuation's tokens becoming text: detokenized, cut at stop strings, counted.

    `detokenize` turns each of the engine's chunks into a TextDelta. While `is_plain`, tokens that
    come with nothing else may go through `push`, their detokenizer's own, and be added to
    `num_tokens`.
    """

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
        "push",
    )

    def __init__(self, index: int, rules: TextRules, detokenizer: Detokenizer) -> None:
        self.index = index
        self.num_tokens = 0  # as counted in usage: the stop token or string included
        self.finished = False
        self._rules = rules
        self._detokenizer = detokenizer
        self.push = detokenizer.push
        self._stops = StopStrings(rules.stops) if rules.stops else None
        self.is_plain = self._stops is None
        self._num_chars = 0  # detokenized so far, held back or not
        self._shown_chars = 0  # given out so far
        self._held_entries: list[tuple[TokenLogprobs, int]] = []

    def detokenize(self, chunk: TokenChunk) -> TextDelta:
        """The text that this chunk makes certain; raises EngineError if it failed."""
        reason = chunk.finish_reason
        if reason is FinishReason.ERROR:
            raise GenerationFailed("The generation failed in the engine.")
        if reason is FinishReason.ABORT:
            raise EngineUnavailable("The generation was ended by the server.")
        by_token = self._rules.by_token and len(chunk.tokens) != 1
        if self._stops is None and not chunk.logprobs and reason is None and not by_token:
            self.num_tokens += len(chunk.tokens)
            return TextDelta(self.index, self.push(chunk.tokens), len(chunk.tokens))
        return self._detokenize_by_token(chunk)

    def _detokenize_by_token(self, chunk: TokenChunk) -> TextDelta:
        """Token by token, so that counts, stop strings and log-probabilities are exact."""
        reason = chunk.finish_reason
        tokens = chunk.tokens
        ends_by_token = is_ended_by_token(chunk, self._rules.stop_token_ids)
        num_shown = len(tokens) - ends_by_token
        shown: list[str] = []
        num_taken = 0
        for i in range(num_shown):
            if chunk.logprobs:
                self._held_entries.append((chunk.logprobs[i], self._num_chars))
            num_taken += 1
            text = self._detokenizer.push(tokens[i : i + 1])
            shown.append(self._feed(text, self.num_tokens + num_taken))
            if self.stop_string is not None:
                return self._delta(shown, num_taken, "stop")
        num_taken += ends_by_token
        if reason is None:
            return self._delta(shown, num_taken, None)
        rest = self._feed(self._detokenizer.flush(), self.num_tokens + num_taken)
        if self.stop_string is not None:
            return self._delta(shown, num_taken, "stop", rest)
        if self._stops is not None:
            rest += self._stops.finish()
        return self._delta(shown, num_taken, reason.value, rest)

    def plain(self, tokens: Sequence[int]) -> TextDelta:
        """The delta of tokens that come with nothing else; they are not counted yet."""
        if len(tokens) == 1 or not self._rules.by_token:
            return TextDelta(self.index, self.push(tokens), len(tokens))
        pieces = [self.push([token]) for token in tokens]
        return TextDelta(self.index, "".join(pieces), len(tokens), pieces=pieces)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return None if self._stops is None else self._stops.found

    def _feed(self, text: str, num_tokens: int) -> str:
        """Add text that this many tokens made certain; what of it is shown now."""
        self._num_chars += len(text)
        if self._stops is None or num_tokens <= self._rules.min_tokens:
            return text
        return self._stops.push(text)

    def _delta(
        self, shown: list[str], num_tokens: int, reason: str | None, rest: str = ""
    ) -> TextDelta:
        text = "".join(shown) + rest
        self.num_tokens += num_tokens
        self._shown_chars += len(text)
        entries = self._held_entries
        if self._shown_chars != self._num_chars:  # text is held back, or was cut off
            entries = [entry for entry in entries if entry[1] < self._shown_chars]
        self._held_entries = self._held_entries[len(entries) :]
        if reason is not None:
            self.finished, self.is_plain = True, False
        return TextDelta(self.index, text, num_tokens, reason, entries, shown, rest)
