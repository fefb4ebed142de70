"""Log-probabilities in the two shapes OpenAI gives them.

An answer may hold hundreds of thousands of entries. An answer that is not streamed is encoded piece
by piece as they arrive (`ChatColumn`, `CompletionColumns`), which bounds memory and does not delay
other streams of the process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from actors.scheduling.plan import TokenLogprobs
from app.api.context import Context
from app.api.endpoints.large import listed_wholes
from app.api.http.errors import invalid
from app.api.http.options import ApiOptions
from app.text.processor import TextProcessor

Entries = Sequence[tuple[TokenLogprobs, int]]
PromptEntries = Sequence[tuple[int, TokenLogprobs | None]]

_FLOOR = -9999.0  # stands for a probability of zero: JSON has no infinity
_SLICE: Final = 2000  # entries written in one turn of the event loop: a few milliseconds
_NAMES: Final = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def token_name(text: TextProcessor, token: int) -> str:
    """A token's text; bytes that are no text of their own are written `bytes:\\x..`."""
    raw = text.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def check_alternatives(options: ApiOptions, num_top: int, param: str) -> None:
    """Raises 400 for more alternatives to a token than this server gives."""
    if num_top > options.max_logprobs:
        raise invalid(
            f"At most {options.max_logprobs} alternatives to a token are given "
            "(setting api.max_logprobs).",
            param,
        )


def check_logprobs(context: Context, num_top: int, num_tokens: int) -> None:
    """Raises 400 for more alternatives or more entries than this server gives."""
    check_alternatives(context.options, num_top, "logprobs")
    context.check_logprob_entries(num_tokens * (1 + num_top), "logprobs")


def _finite(logprob: float) -> float:
    return max(float(logprob), _FLOOR)


# ---- /v1/completions ----------------------------------------------------------------------


class CompletionColumns:
    """The four parallel lists of /v1/completions, already written. num_top: as asked for."""

    def __init__(self, text: TextProcessor, num_top: int) -> None:
        self._text = text
        self._num_top = num_top
        self._parts: tuple[list[bytes], ...] = ([], [], [], [])  # in the order of _NAMES

    def add(self, entries: Entries, offset: int) -> None:
        """offset: characters before the continuation's own text."""
        if entries:
            self._write(completion_logprobs(self._text, entries, self._num_top, offset))

    async def add_prompt(self, prompt: PromptEntries, echo: str) -> None:
        """(token, its log-probabilities) of a prompt echoed so; the first token has none."""
        text, num_top = self._text, self._num_top
        detokenizer = text.detokenizer(skip_special_tokens=True)
        num_chars, per_slice = 0, max(1, _SLICE // (1 + num_top))
        for start in range(0, len(prompt), per_slice):
            part = prompt[start : start + per_slice]
            offsets = []
            for token, _ in part:
                offsets.append(num_chars)
                num_chars += len(detokenizer.push([token]))
                if token in text.special_ids:  # of those, the echo has what the prompt's text has
                    name = text.decode([token], skip_special_tokens=False)
                    num_chars += len(name) if echo.startswith(name, num_chars) else 0
            self._write(
                {
                    "tokens": [token_name(text, token) for token, _ in part],
                    "token_logprobs": [None if f is None else _finite(f.logprob) for _, f in part],
                    "top_logprobs": [None if f is None else _top(text, f, num_top) for _, f in part]
                    if num_top
                    else None,
                    "text_offset": offsets,
                }
            )
            await asyncio.sleep(0)

    def _write(self, lists: dict[str, Any]) -> None:
        for parts, name in zip(self._parts, _NAMES, strict=True):
            if lists[name] is not None:
                parts.append(json.dumps(lists[name])[1:-1].encode())

    def followed_by(self, others: CompletionColumns) -> Iterator[bytes]:
        """JSON of these lists and then the others'."""
        for number, name in enumerate(_NAMES):
            yield f'{", " if number else "{"}"{name}": '.encode()
            if name == "top_logprobs" and not self._num_top:
                yield b"null"
            else:
                yield from listed_wholes(
                    [p] for p in [*self._parts[number], *others._parts[number]]
                )
        yield b"}"


def completion_logprobs(
    text: TextProcessor, entries: Entries, num_top: int, offset: int
) -> dict[str, Any]:
    """The lists of a continuation's tokens. offset: characters before the continuation's text."""
    return {
        "tokens": [token_name(text, found.token) for found, _ in entries],
        "token_logprobs": [_finite(found.logprob) for found, _ in entries],
        "top_logprobs": [_top(text, found, num_top) for found, _ in entries] if num_top else None,
        "text_offset": [offset + start for _, start in entries],
    }


def _top(text: TextProcessor, found: TokenLogprobs, num_top: int) -> dict[str, float]:
    """The likeliest tokens, and the sampled one even where it is not among them."""
    top = {token_name(text, token): _finite(value) for token, value in found.top[:num_top]}
    top.setdefault(token_name(text, found.token), _finite(found.logprob))
    return top


# ---- /v1/chat/completions -----------------------------------------------------------------


class TokenTexts(dict[int, tuple[str, str]]):
    """JSON of an entry, before and after its log-probability, of every token met so far: most of
    an answer's entries are of few tokens, and writing one anew takes ten times as long."""

    def __init__(self, text: TextProcessor) -> None:
        super().__init__()
        self._text = text

    def __missing__(self, token: int) -> tuple[str, str]:
        entry = json.dumps(_chat_entry(self._text, token, 0.0))
        before, between, after = entry.rpartition('"logprob": 0.0')
        found = self[token] = (before + between.removesuffix("0.0"), after[:-1])
        return found


class ChatColumn:
    """The `logprobs` object of /v1/chat/completions, already written. texts: those of the answer's
    other columns too."""

    def __init__(self, texts: TokenTexts, num_top: int) -> None:
        self._texts = texts
        self._num_top = num_top
        self._parts: list[bytes] = []

    def add(self, entries: Entries) -> None:
        if entries:
            self._parts.append(", ".join([self._entry(found) for found, _ in entries]).encode())

    def _entry(self, found: TokenLogprobs) -> str:
        """As `chat_logprobs` has it."""
        texts = self._texts
        top = []
        for token, value in found.top[: self._num_top]:
            before, after = texts[token]
            top.append(f"{before}{_finite(value)!r}{after}}}")
        before, after = texts[found.token]
        return f'{before}{_finite(found.logprob)!r}{after}, "top_logprobs": [{", ".join(top)}]}}'

    def written(self) -> Iterator[bytes]:
        yield b'{"content": '
        yield from listed_wholes([part] for part in self._parts)
        yield b', "refusal": null}'


def chat_logprobs(text: TextProcessor, entries: Entries, num_top: int) -> dict[str, Any]:
    """The `content` list of /v1/chat/completions."""
    return {
        "content": [
            {
                **_chat_entry(text, found.token, found.logprob),
                "top_logprobs": [
                    _chat_entry(text, token, value) for token, value in found.top[:num_top]
                ],
            }
            for found, _ in entries
        ],
        "refusal": None,
    }


def _chat_entry(text: TextProcessor, token: int, logprob: float) -> dict[str, Any]:
    raw = text.token_bytes(token)
    return {"token": token_name(text, token), "logprob": _finite(logprob), "bytes": list(raw)}


# ---- /v1/responses ------------------------------------------------------------------------


class EntriesOfText:
    """Keeps, of all entries of an answer, those of its text: not of reasoning, calls and marks."""

    def __init__(self) -> None:
        self._entries: list[tuple[TokenLogprobs, int]] = []
        self._unread = ""  # what the answer is parsed from, behind the last text found
        self._begin = 0  # where that begins

    def add(self, entries: Entries) -> None:
        self._entries += entries

    def read(self, source: str) -> None:
        """More of what the answer is parsed from."""
        self._unread += source

    def of(self, text: str) -> Entries:
        """Those of this text, which was found in what was read last."""
        at = self._unread.rfind(text)
        if at < 0:  # a line end that is put between two texts
            text = text.removeprefix("\n")
            at = self._unread.rfind(text)
        if at < 0:
            return []
        begin = self._begin + at
        found = [entry for entry in self._entries if begin <= entry[1] < begin + len(text)]
        self._skip(at + len(text))
        return found

    def _skip(self, num_chars: int) -> None:
        self._unread = self._unread[num_chars:]
        self._begin += num_chars
        self._entries = [entry for entry in self._entries if entry[1] >= self._begin]

    def skip(self) -> None:
        """What was read is no text."""
        self._skip(len(self._unread))

    def rest(self) -> Entries:
        """Those of the answer's end, which have no text."""
        return self._entries if not self._unread else []
