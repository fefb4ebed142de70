"""A text that is still growing, read by generators that wait where it ends.

A reader is a generator that yields whenever it needs more text than there is, so a format is
written as if its text were whole and reads it however it is cut. Between `forget`s the whole text
is kept, so that a reader which fails can go back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

_Value = TypeVar("_Value")
Reading = Generator[None, None, _Value]

_BLANKS: Final = re.compile(r"[ \t\r\n]+")


class Broken(Exception):
    """What is read is not what was expected: it is text, and no call."""


class Source:
    """text: what is kept of it. at: the place of the reader in it. ended: no more will come."""

    __slots__ = ("at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def feed(self, text: str) -> None:
        """More of the text."""
        self.text += text

    def forget(self) -> None:
        """Let go of what has been read; places noted before mean nothing after it."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def sees(self, *literals: str) -> Reading[str]:
        """The first of these that stands here, "" where none does."""
        longest = max(map(len, literals))
        while True:
            rest = self.text[self.at : self.at + longest]
            for literal in literals:
                if rest.startswith(literal):
                    return literal
            if self.ended or not any(literal.startswith(rest) for literal in literals):
                return ""
            yield

    def accept(self, *literals: str) -> Reading[str]:
        """The same, and reads it."""
        found = yield from self.sees(*literals)
        self.at += len(found)
        return found

    def expect(self, *literals: str) -> Reading[str]:
        """The same; raises Broken where none stands here."""
        found = yield from self.accept(*literals)
        if not found:
            raise Broken
        return found

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """As many characters as there are of the class that `pattern` repeats."""
        start = self.at
        while True:
            found = pattern.match(self.text, self.at)
            if found is not None:
                self.at = found.end()
            if self.at < len(self.text) or self.ended:
                return self.text[start : self.at]
            yield

    def blanks(self) -> Reading[None]:
        """Read over white space."""
        yield from self.run(_BLANKS)

    def until(self, *marks: str) -> Reading[tuple[str, str]]:
        """What precedes the first of these marks, and the mark; both are read.

        Raises Broken where the text ends without one.
        """
        start = searched = self.at
        longest = max(map(len, marks))
        while True:
            place, mark = self._first(marks, searched)
            if mark:
                self.at = place + len(mark)
                return self.text[start:place], mark
            if self.ended:
                raise Broken
            searched = max(start, len(self.text) - longest + 1)
            yield

    def shown_until(self, marks: tuple[str, ...], show: Callable[[str], None]) -> Reading[str]:
        """Show and forget what precedes the first of these marks; the mark, which is not read.

        "" at the end. What may still become a mark is held back.
        """
        while True:
            place, mark = self._first(marks, self.at)
            if not mark:
                place = len(self.text) - (0 if self.ended else self._num_undecided(marks))
            show(self.text[self.at : place])
            self.at = place
            self.forget()
            if mark or self.ended:
                return mark
            yield

    def _first(self, marks: tuple[str, ...], start: int) -> tuple[int, str]:
        found = [(place, m) for m in marks if (place := self.text.find(m, start)) >= 0]
        return min(found, default=(-1, ""))

    def _num_undecided(self, marks: tuple[str, ...]) -> int:
        """How many characters at the end may be the beginning of a mark."""
        num_unread = len(self.text) - self.at
        longest = min(max(map(len, marks), default=1) - 1, num_unread)
        tail = self.text[len(self.text) - longest :]
        if not any(mark[0] in tail for mark in marks):
            return 0
        for size in range(longest, 0, -1):
            end = tail[longest - size :]
            if any(mark.startswith(end) for mark in marks):
                return size
        return 0
