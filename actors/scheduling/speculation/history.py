"""What an engine has served: the texts in which later requests are looked up."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from actors.scheduling.request import Request
from actors.scheduling.speculation.text import Text

AT_ONCE = 2048  # tokens read in one plan, of all texts: about 0.5 ms
_PART = 1 << 15  # tokens of a part of a history; the older of two is forgotten
_MOST = 16  # histories: about a megabyte each
_MOST_PENDING = 2 * _PART  # tokens


@dataclass(slots=True)
class Reading:
    """Tokens that may still be read in this plan: of long prompts, of which many may begin to
    decode at once, and of texts that have been served."""

    left: int = AT_ONCE

    def take(self, most: int) -> int:
        count = min(most, self.left)
        self.left -= count
        return count


class History:
    """The last prompts and answers, of which the newest tens of thousands of tokens are known."""

    __slots__ = ("_newer", "_older", "_pending")

    def __init__(self) -> None:
        self._newer, self._older = Text(_PART), Text(0)
        self._pending: deque[Sequence[int]] = deque()  # not read yet, in order

    def add(self, *texts: Sequence[int]) -> None:
        self._pending += texts
        while sum([len(text) for text in self._pending]) > _MOST_PENDING:
            self._pending.popleft()

    def read(self, reading: Reading) -> None:
        pending = self._pending
        while pending and reading.left:
            text = pending[0]
            count = reading.take(len(text))
            self._newer.append(text[:count])
            if count == len(text):
                pending.popleft()
            else:
                pending[0] = text[count:]
            if len(self._newer.tokens) >= _PART:
                self._older, self._newer = self._newer, Text(_PART)

    def find(self, suffix: Sequence[int]) -> tuple[Text, int, int]:
        """The text with the longest match, and its answer; the newer one if both are alike."""
        newer = self._newer.find(suffix)
        if not self._older.tokens:
            return self._newer, *newer
        older = self._older.find(suffix)
        if older[1] > newer[1]:
            return self._older, *older
        return self._newer, *newer


class Histories:
    """By tenant and cache salt: like cached prefixes, nobody's text shows in another's timing."""

    def __init__(self) -> None:
        self._histories: dict[tuple[str, str], History] = {}  # the least recently used first

    def of(self, request: Request) -> History:
        key = request.tenant, request.cache_salt
        history = self._histories.pop(key, None) or History()
        if len(self._histories) >= _MOST:
            del self._histories[next(iter(self._histories))]
        self._histories[key] = history
        return history

    def read(self, reading: Reading) -> None:
        for history in reversed(self._histories.values()):
            if not reading.left:
                return
            history.read(reading)
