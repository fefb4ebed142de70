"""Deadlines that count only the time in which the process that judges has run.

A machine that stands still (a suspended computer, a frozen container, a virtual machine that moves)
stops those that are judged together with their judge. By the clock alone, every deadline that
passes meanwhile finds a healthy peer dead. Here a judge looks in short periods and counts no more
than two of them from one look to the next, so it gives its peers the rest of the time once it runs
again. A judge that is late by no more than a period, as under load, loses nothing by that.

For peers only: what was promised to a client ends by the clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

# Periods of a limit. However late its looks are, it has passed after half as many; standing still
# costs at most two.
LOOKS = 8


class RunningTime:
    """What one judge has seen pass, of one wait at a time."""

    def __init__(self) -> None:
        self._since_s = self._looked_s = float("nan")  # of the wait seen last: its begin, the look
        self._ran_s = 0.0  # of it, up to that look

    def since(self, since_s: float, now_s: float, period_s: float) -> float:
        """Seconds that count of a wait that began at `since_s`. A wait with another begin is
        another wait.

        period_s: between two looks, that is, calls of this.
        """
        if since_s != self._since_s:
            self._since_s = self._looked_s = since_s
            self._ran_s = 0.0
        self._ran_s += min(now_s - self._looked_s, 2 * period_s)
        self._looked_s = now_s
        return self._ran_s


@asynccontextmanager
async def running_timeout(limit_s: float) -> AsyncGenerator[None]:
    """As `asyncio.timeout`: raises TimeoutError once this event loop has run for so long."""
    loop, ran = asyncio.get_running_loop(), RunningTime()
    begin_s, period_s = time.monotonic(), limit_s / LOOKS
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as timeout:

        def look() -> None:
            nonlocal timer
            left_s = limit_s - ran.since(begin_s, time.monotonic(), period_s)
            if left_s > 0:
                timer = loop.call_later(min(left_s, period_s), look)
            else:
                timeout.reschedule(loop.time())

        timer = loop.call_later(period_s, look)
        try:
            yield
        finally:
            timer.cancel()
