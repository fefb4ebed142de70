"""Iterations reach observers at once, and consoles in the batches in which they read them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actors.transport.messages import IterationRecord
from app.engine_client import iteration_feed
from app.engine_client.iteration_feed import IterationFeed

ROWS = [tuple(range(n, n + len(IterationRecord._fields))) for n in (0, 100, 200)]
DICTS = [IterationRecord(*row)._asdict() for row in ROWS]


async def test_observers_are_called_at_once() -> None:
    seen: list[tuple[Sequence[IterationRecord], str]] = []
    feed = IterationFeed()
    feed.observers.append(lambda records, engine_id: seen.append((records, engine_id)))
    feed.publish(ROWS[:2], "engine-0")
    assert seen == [([IterationRecord(*row) for row in ROWS[:2]], "engine-0")]


async def test_a_console_reads_what_has_come_since_as_one_batch() -> None:
    feed = IterationFeed()
    batches = feed.subscribe()
    first = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)  # it subscribes
    feed.publish(ROWS[:1])
    assert await first == DICTS[:1]
    feed.publish(ROWS[1:2])
    feed.publish(ROWS[2:])
    assert await anext(batches) == DICTS[1:]


async def test_a_console_that_does_not_read_misses_iterations_and_delays_no_end() -> None:
    feed = IterationFeed()
    batches = feed.subscribe()
    first = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    for _ in range(iteration_feed._MAX_QUEUED + 5):
        feed.publish(ROWS[:1])
    assert len(await first) == iteration_feed._MAX_QUEUED
    for _ in range(iteration_feed._MAX_QUEUED):
        feed.publish(ROWS[:1])
    feed.close()
    assert [batch async for batch in batches] == []


async def test_a_console_that_waits_ends_with_the_feed() -> None:
    feed = IterationFeed()
    end = asyncio.ensure_future(anext(feed.subscribe(), None))
    await asyncio.sleep(0)
    feed.close()
    assert await end is None
