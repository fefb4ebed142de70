"""Readers that stop reading are dropped, at no cost per token.

A timer per send would cost more than the send; instead each stream notes when its pending send
began, and one timer for all streams looks once a second.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

_LOOK_EVERY_S: Final = 1.0


class SlowReader:
    """One stream's entry. sending_since_s: start of the pending send, 0 when none."""

    __slots__ = ("dropped", "sending_since_s", "task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.sending_since_s = 0.0
        self.dropped = False


class SlowReaders:
    """All streams now open; cancels the task of one whose send takes longer than timeout_s."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._open: set[SlowReader] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self) -> SlowReader:
        """Watch the current task's stream."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a stream needs a running task")
        entry = SlowReader(task)
        self._open.add(entry)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(
                min(_LOOK_EVERY_S, self._timeout_s), self._look
            )
        return entry

    def remove(self, entry: SlowReader) -> None:
        """The stream is over."""
        self._open.discard(entry)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - self._timeout_s
        for entry in self._open:
            if 0.0 < entry.sending_since_s < oldest_s and not entry.dropped:
                entry.dropped = True
                entry.task.cancel()
        self._timer = (
            loop.call_later(min(_LOOK_EVERY_S, self._timeout_s), self._look) if self._open else None
        )
