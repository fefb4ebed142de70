"""A growing text, read by generators that wait for more.

A reader is a generator that yields when it needs more text, so a format is written as if the text
were complete. Text is kept until `forget`, so a reader that fails can go back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

_Value = TypeVar("_Value")
Reading = Generator[None, None, _Value]

_BLANKS: Final = re.compile(r"[ \t\r\n]+")
_PART: Final = 1 << 10  # characters


class Broken(Exception):
    """The text does not match the format: it is not a call."""


class Source:
    """text: the part still kept. at: the reader's position in it. ended: the text is complete.
    left_out: marks that are never shown. frame_ends: those that are not shown before a call or at
    the end of the text, with only blanks between."""

    __slots__ = ("_num_without", "at", "ended", "frame_ends", "left_out", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.left_out: tuple[str, ...] = ()
        self.frame_ends: tuple[str, ...] = ()
        # Marks -> characters at the end of the complete text that hold none of them. Those who
        # look for the same in vain again and again take linear time with this.
        self._num_without: dict[tuple[str, ...], int] = {}

    def feed(self, text: str) -> None:
        """Append text."""
        self.text += text

    def forget(self) -> None:
        """Drop the text already read; earlier positions become invalid."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Reading[str]:
        """The next character, or "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def sees(self, *literals: str) -> Reading[str]:
        """The first of these literals that follows here, or ""."""
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
        """Like `sees`, and reads the literal."""
        found = yield from self.sees(*literals)
        self.at += len(found)
        return found

    def expect(self, *literals: str) -> Reading[str]:
        """Like `accept`; raises Broken if none follows."""
        found = yield from self.accept(*literals)
        if not found:
            raise Broken
        return found

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the longest run that `pattern`, a repeated character class, matches."""
        start = self.at
        while True:
            found = pattern.match(self.text, self.at)
            if found is not None:
                self.at = found.end()
            if self.at < len(self.text) or self.ended:
                return self.text[start : self.at]
            yield

    def blanks(self) -> Reading[None]:
        """Skip white space."""
        yield from self.run(_BLANKS)

    def until(self, *marks: str) -> Reading[tuple[str, str]]:
        """Read up to and including the first of these marks: (text before it, mark).

        Raises Broken if the text ends without one.
        """
        start = searched = self.at
        if self.ended and len(self.text) - start <= self._num_without.get(marks, -1):
            raise Broken
        longest = max(map(len, marks))
        while True:
            place, mark = self._first(marks, searched)
            if mark:
                self.at = place + len(mark)
                return self.text[start:place], mark
            if self.ended:
                self._num_without[marks] = len(self.text) - start
                raise Broken
            searched = max(start, len(self.text) - longest + 1)
            yield

    def go_to(self, *marks: str) -> Reading[str]:
        """Go to the first of these marks, as far as there is none; returns it, unread, or "" at the
        end of the text."""
        while True:
            place, mark = self._first(marks, self.at)
            if mark:
                self.at = place
                return mark
            self.at = len(self.text) - (0 if self.ended else self._num_undecided(marks))
            if self.ended:
                return ""
            yield

    def shown_until(self, marks: tuple[str, ...], show: Callable[[str], None]) -> Reading[str]:
        """Show and forget the text before the first of these marks; returns the mark, unread.

        "" at the end of the text. A possible beginning of a mark is held back.
        """
        known = marks + self.left_out + self.frame_ends
        while True:
            place, mark = self._first(known, self.at)
            if not mark:
                place = len(self.text) - (0 if self.ended else self._num_undecided(known))
            show(self.text[self.at : place])
            self.at = place
            self.forget()
            if mark in self.left_out or mark in self.frame_ends:
                if mark in self.frame_ends and not (yield from self._ends(mark, marks)):
                    show(mark)
                self.at = len(mark)
                continue
            if mark or self.ended:
                return mark
            yield

    def _ends(self, mark: str, openings: tuple[str, ...]) -> Reading[bool]:
        """Whether the mark here ends a frame: other text than these openings makes it text."""
        start = self.at
        self.at += len(mark)
        yield from self.blanks()
        following = yield from self.peek()
        if following and openings:
            following = "" if (yield from self.sees(*openings)) else following
        self.at = start
        return not following

    def _first(self, marks: tuple[str, ...], start: int) -> tuple[int, str]:
        """In ever longer parts, so that a mark that is far away or missing is not searched for to
        the end of the text each time that another is found."""
        size = _PART
        while start < len(self.text):
            end = start + size
            found = [
                (place, mark)
                for mark in marks
                if (place := self.text.find(mark, start, end + len(mark) - 1)) >= 0
            ]
            if found:
                return min(found)
            start, size = end, 2 * size
        return -1, ""

    def _num_undecided(self, marks: tuple[str, ...]) -> int:
        """Number of characters at the end that may begin a mark."""
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
