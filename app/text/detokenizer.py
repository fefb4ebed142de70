"""Tokens to text as they arrive: a character split over tokens is held back until it is whole.

Feeding the tokens in any grouping gives the same text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

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
        """What was held back; bytes that never became a character come as U+FFFD."""
        ...


class TableDetokenizer:
    """Detokenises by table look-up: well under a microsecond per token.

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
    """Detokenises with any tokenizer, by decoding a short window twice.

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
