"""Passes the records of an engine's iterations to telemetry and to consoles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from actors.transport.messages import IterationRecord

_MAX_QUEUED: Final = 1000  # batches per subscriber


class IterationFeed:
    """Calls `observers` (telemetry) at once, and queues records for subscribers (consoles).

    Observers also get the engine's id; "" without a fleet.
    """

    def __init__(self) -> None:
        self.observers: list[Callable[[Sequence[IterationRecord], str], None]] = []
        self._subscribers: set[asyncio.Queue[Sequence[IterationRecord] | None]] = set()
        self._closed = False

    def publish(self, rows: Iterable[tuple[Any, ...]], engine_id: str = "") -> None:
        records = [IterationRecord(*row) for row in rows]
        for observer in self.observers:
            observer(records, engine_id)
        for queue in self._subscribers:
            with suppress(asyncio.QueueFull):  # a console that does not read misses iterations
                queue.put_nowait(records)

    def close(self) -> None:
        """End every subscription, so that an open console does not delay shutdown."""
        self._closed = True
        for queue in self._subscribers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def subscribe(self) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        """Batches of iterations as dicts, until the feed is closed."""
        queue: asyncio.Queue[Sequence[IterationRecord] | None] = asyncio.Queue(_MAX_QUEUED)
        self._subscribers.add(queue)
        try:
            while not self._closed:
                batches = [await queue.get()]
                while not queue.empty():
                    batches.append(queue.get_nowait())
                records = [record for batch in batches if batch is not None for record in batch]
                if records:
                    yield [record._asdict() for record in records]
        finally:
            self._subscribers.discard(queue)
