"""Every iteration's record to those who watch: telemetry at once, consoles as they read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from actors.messages import iteration_dict

Observer = Callable[[list[Any]], None]
_MAX_QUEUED: Final = 1000  # records per subscriber


class IterationFeed:
    """Records as `messages.ITERATION_FIELDS`; `observers` are called with each of them."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self._subscribers: set[asyncio.Queue[list[Any] | None]] = set()
        self._closed = False

    def publish(self, record: list[Any]) -> None:
        for observer in self.observers:
            observer(record)
        for queue in self._subscribers:
            with suppress(asyncio.QueueFull):  # a console that sleeps misses iterations
                queue.put_nowait(record)

    def close(self) -> None:
        """End every subscription: whoever watches must not hold up a replica that leaves."""
        self._closed = True
        for queue in self._subscribers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def subscribe(self) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        """Batches of iterations as dicts, from now on until the feed is closed."""
        queue: asyncio.Queue[list[Any] | None] = asyncio.Queue(_MAX_QUEUED)
        self._subscribers.add(queue)
        try:
            while not self._closed:
                batch = [await queue.get()]
                while not queue.empty():
                    batch.append(queue.get_nowait())
                known = [record for record in batch if record is not None]
                if known:
                    yield [iteration_dict(record) for record in known]
        finally:
            self._subscribers.discard(queue)
