"""A front's search for engines ends with the front."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from app.fleet.finder import Finder


class NoEngines:
    """A registry in which no engine is, and the number of times that it was read."""

    num_reads = 0

    async def ids(self) -> list[str]:
        self.num_reads += 1
        return []


@pytest.mark.parametrize("num_turns", range(5))
async def test_its_end_is_not_lost_as_it_is_woken(num_turns: int) -> None:
    """An engine that ends with its fleet wakes the search, turns of the loop before its end."""
    registry: Any = NoEngines()
    finder = Finder(registry, "node")
    owner: Any = SimpleNamespace()
    finder.start(owner)
    await finder.refreshed()
    await asyncio.sleep(0)
    finder.refresh()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await finder.close()
    num_reads = registry.num_reads
    finder.refresh()
    for _ in range(5):
        await asyncio.sleep(0)
    assert registry.num_reads == num_reads
