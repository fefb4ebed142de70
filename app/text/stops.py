"""Stop strings: found across token borders, text held back only while it may still become one."""

from __future__ import annotations

from collections.abc import Sequence


def _failure_table(pattern: str) -> list[int]:
    """Knuth-Morris-Pratt: the longest proper border of every prefix of `pattern`."""
    table = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[i] != pattern[matched]:
            matched = table[matched - 1]
        if pattern[i] == pattern[matched]:
            matched += 1
        table[i] = matched
    return table


class StopStrings:
    """Watches a text for the first of several strings, however the text is cut into pieces.

    The string that is completed first wins, and of two completed by the same character the
    longer. What precedes it is the whole text.

    >>> watch = StopStrings(["END"])
    >>> watch.push("the E"), watch.push("N"), watch.push("D of")
    ('the ', '', '')
    >>> watch.found
    'END'
    """

    __slots__ = ("_first", "_held", "_matched", "_patterns", "_tables", "found", "rest")

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = sorted(patterns, key=len, reverse=True)
        self._tables = [_failure_table(pattern) for pattern in self._patterns]
        self._matched = [0] * len(self._patterns)  # characters of each pattern now at the end
        self._first = frozenset(pattern[0] for pattern in self._patterns)
        self._held = ""  # the end of the text that may still become a stop string
        self.found: str | None = None
        self.rest = ""  # what followed the found string in the same push

    def push(self, text: str) -> str:
        """Take more text, return what is certain to be wanted. Nothing comes after a find."""
        if self.found is not None or not text:
            return ""
        if not self._held and self._first.isdisjoint(text):
            return text
        for end, char in enumerate(text, start=1):
            for which, pattern in enumerate(self._patterns):
                matched, table = self._matched[which], self._tables[which]
                while matched and pattern[matched] != char:
                    matched = table[matched - 1]
                if pattern[matched] == char:
                    matched += 1
                if matched == len(pattern):
                    self.found = pattern
                    self.rest = text[end:]
                    whole = self._held + text[:end]
                    self._held = ""
                    return whole[: len(whole) - len(pattern)]
                self._matched[which] = matched
        whole = self._held + text
        keep = max(self._matched)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def finish(self) -> str:
        """The text has ended: what was held back is text after all."""
        held, self._held = self._held, ""
        return held
