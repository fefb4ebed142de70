"""Several calls behind one opening: a malformed one is text, and takes no other along."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Final

from app.text.output.json_text import json_call
from app.text.output.pieces import MOST_MISREAD, AnswerPieces, Draft
from app.text.output.source import Broken, Reading, Source

CallReader = Callable[[Source, Draft], Reading[None]]
_PAIRS: Final = {")": "(", "]": "[", "}": "{"}
_BLANKS: Final = " \t\r\n"
_BEFORE_TEXT: Final = "([{,:=+-*/%<>&|"  # beside a member's beginning


def listed_calls(
    source: Source, out: AnswerPieces, marks: tuple[str, ...], read: CallReader = json_call
) -> Reading[None]:
    """Calls of a JSON list, after its opening bracket; the end of the text may replace its end.
    marks: those of the format, at which a malformed call ends at the latest. read: of one call."""

    def member_end() -> Reading[None]:
        yield from source.blanks()
        if not (source.ended and source.at == len(source.text)):
            yield from source.expect(",", "]")
            source.at -= 1

    def skip(start: int) -> Reading[bool]:
        return skip_member(source, start, marks, '"', ",]")

    while True:
        yield from source.blanks()
        is_call = yield from one_of_several(source, out, read, member_end, skip)
        yield from source.blanks()
        if source.ended and source.at == len(source.text):
            return
        mark = yield from source.expect(",", "]")
        if mark == "]":
            if not is_call:
                raise Broken  # the rest of the list is text, too
            return


def one_of_several(
    source: Source,
    out: AnswerPieces,
    read: CallReader,
    read_end: Callable[[], Reading[None]],
    skip: Callable[[int], Reading[bool]],
) -> Reading[bool]:
    """Read a call among others; False for a malformed one, which is shown as text. What was sent of
    one has no such text.

    read_end: of what has to follow it. skip: goes from the beginning of a malformed call to its
    end; returns whether it has one. Raises Broken if not, or if nothing tells calls from text.
    """
    start = source.at
    draft = out.draft(source)
    try:
        yield from read(source, draft)
        draft.close()
        yield from read_end()
        return True
    except Broken:
        is_sent = out.open is not None and draft.is_sent
        if out.unshown_at is None and not is_sent:
            raise
    num_read = source.at
    if is_sent:
        found = yield from skip(start)
    else:
        out.open = None
        found = yield from _shown(skip(start), source, out)
    out.num_misread += max(0, num_read - source.at)
    if not found:
        raise Broken
    if is_sent:
        draft.abandon()
        out.settled_at = source.at
    if out.num_misread >= MOST_MISREAD:
        raise Broken
    return is_sent


def _shown(
    reading: Generator[None, None, bool], source: Source, out: AnswerPieces
) -> Reading[bool]:
    """Show what is read as text, and settle it."""
    while True:
        found: bool | None = None
        try:
            next(reading)
        except StopIteration as stop:
            found = stop.value
        if out.unshown_at is not None and source.at > out.unshown_at:
            out.text(source.text[out.unshown_at : source.at])
            out.settled_at = source.at
        if found is not None:
            return found
        yield


def skip_member(
    source: Source, start: int, marks: tuple[str, ...], quotes: str, ends: str
) -> Reading[bool]:
    """Go from the beginning of a list's member to one of `ends` outside of texts and brackets;
    False, at a mark or at the end of the text, if there is none. A quotation mark where no text can
    begin, or before a letter, where none ends, is an apostrophe, or one that lacks its escape."""
    source.at = start
    plain = _plain(marks, quotes, ends)
    opened: list[str] = []  # brackets
    num_opened = Counter[str]()
    quote = ""
    while True:
        yield from source.run(plain)
        if marks and (yield from source.sees(*marks)):
            return False
        char = yield from source.peek()
        if not char:
            return False
        if quote and char == quote[0]:
            if (yield from source.accept(quote)):
                if len(quote) > 1 or not _is_in_word((yield from source.peek())):
                    quote = ""
                continue
        elif quote:
            if char == "\\":
                source.at += 1
                if not (yield from source.peek()):
                    return False
        elif char in quotes and _begins_text(source, start, quotes):
            quote = char
            # Python's, which has two kinds of them, may be three.
            if len(quotes) > 1 and (yield from source.accept(char * 3)):
                quote = char * 3
                continue
        elif char in _PAIRS and num_opened[_PAIRS[char]]:
            closed = ""
            while closed != _PAIRS[char]:
                closed = opened.pop()
                num_opened[closed] -= 1
        elif char in ends and (not opened or char in _PAIRS):
            return True
        elif char in _PAIRS.values():
            opened.append(char)
            num_opened[char] += 1
        source.at += 1


def _is_in_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _begins_text(source: Source, start: int, quotes: str) -> bool:
    """Whether the quotation mark here may begin a text of a member that begins at `start`."""
    before, at = source.text, source.at
    if len(quotes) > 1:  # Python's, which may have prefixes
        while at > start and source.at - at < 2 and before[at - 1] in "bBfFrRuU":
            at -= 1
    while at > start and before[at - 1] in _BLANKS:
        at -= 1
    return at == start or before[at - 1] in _BEFORE_TEXT


@lru_cache(maxsize=128)
def _plain(marks: tuple[str, ...], quotes: str, ends: str) -> re.Pattern[str]:
    """Characters that begin no mark, and have no part in the structure of a list."""
    chars = {*quotes, *ends, *_PAIRS, *_PAIRS.values(), "\\", *(mark[0] for mark in marks)}
    return re.compile(f"[^{re.escape(''.join(sorted(chars)))}]+")
