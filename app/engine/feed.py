"""Iterations' records to those who watch: telemetry at once, consoles as they read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from actors.transport.messages import iteration_dict

Record = list[Any]  # messages.ITERATION_FIELDS
Observer = Callable[[list[Record]], None]
_MAX_QUEUED: Final = 1000  # batches per subscriber


class IterationFeed:
    """Records come in batches, as the scheduler sends them; `observers` get each batch."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self._subscribers: set[asyncio.Queue[list[Record] | None]] = set()
        self._closed = False

    def publish(self, records: list[Record]) -> None:
        for observer in self.observers:
            observer(records)
        for queue in self._subscribers:
            with suppress(asyncio.QueueFull):  # a console that sleeps misses iterations
                queue.put_nowait(records)

    def close(self) -> None:
        """End every subscription: whoever watches must not hold up a replica that leaves."""
        self._closed = True
        for queue in self._subscribers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def subscribe(self) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        """Batches of iterations as dicts, from now on until the feed is closed."""
        queue: asyncio.Queue[list[Record] | None] = asyncio.Queue(_MAX_QUEUED)
        self._subscribers.add(queue)
        try:
            while not self._closed:
                batches = [await queue.get()]
                while not queue.empty():
                    batches.append(queue.get_nowait())
                records = [record for batch in batches if batch is not None for record in batch]
                if records:
                    yield [iteration_dict(record) for record in records]
        finally:
            self._subscribers.discard(queue)
