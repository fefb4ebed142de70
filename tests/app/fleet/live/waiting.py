"""Waiting for a condition, bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Returns once it holds; fails where it does not in time."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it never came to be"
        await asyncio.sleep(0.01)  # polling, bounded
