"""Engines die at random moments of a drain, on either side of the copies: nothing is lost.

`test_draining` has a death at each moment that differs from the others; here they are drawn.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.fleet.connection import Connection
from tests.app.fleet.live.conftest import SHARE_BYTES
from tests.app.fleet.live.test_draining import Hook
from tests.app.fleet.live.test_draining import before_asking as before_asking
from tests.app.fleet.live.test_draining import unhurried as unhurried
from tests.app.fleet.live.test_failover import mixed, through
from tests.app.fleet.live.test_split import all_at_rest, largest_share, processes, struck
from tests.app.fleet.live.waiting import until
from tests.tiny_models import SLOW

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]

CAMPAIGN = [
    pytest.param(4, seed, seed % 2 == 0, marks=pytest.mark.long, id=f"seed-{seed}")
    for seed in range(8)
]


class Drain:
    """The fleet's first engine, `source`, leaves, and a process of it or of another is killed.

    num_copied: streams that were being copied then; -1 before.
    """

    def __init__(
        self, fleet: Any, pids: dict[str, list[int]], source: str, draw: random.Random
    ) -> None:
        self._fleet = fleet
        self._pids = pids
        self._source = source
        self._draw = draw
        self._left: list[asyncio.Task[None]] = []
        self.num_copied = -1

    def begin(self) -> None:
        self._left.append(asyncio.create_task(self._fleet.engines[0].leave()))

    def kill_source(self) -> None:
        self._kill(self._source)

    def kill_target(self) -> None:
        """One that fetches from it, if any does."""
        others = [engine_id for engine_id in self._pids if engine_id != self._source]
        copied = self._fleet.front._placement._copies.open.values()
        self._kill(self._draw.choice([r.receiver_id for r in copied if r.receiver_id] or others))

    def _kill(self, engine_id: str) -> None:
        self.num_copied = len(self._fleet.front._placement._copies.open)
        os.kill(self._draw.choice(self._pids[engine_id]), signal.SIGKILL)

    async def ended(self) -> None:
        (left,) = self._left
        await left


@pytest.mark.parametrize(("num_rounds", "seed", "is_hurried"), CAMPAIGN)
async def test_kills_at_any_moment_of_a_drain_lose_and_double_nothing(
    make_fleet: Callable[..., Any],
    sections: dict[str, Any],
    before_asking: Callable[[Hook], None],
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    num_rounds: int,
    seed: int,
    is_hurried: bool,
) -> None:
    if not is_hurried:
        request.getfixturevalue("unhurried")
    fleet = await make_fleet(3, tiny_model("llama", **SLOW), **sections)
    front = fleet.front
    unfailed, _ = await through(front, mixed())
    draw = random.Random(seed)
    at_steps: list[Callable[[], None] | None] = []  # what falls at the next steps of copies

    async def step(connection: Connection, question: str) -> None:
        if at_steps and (strike := at_steps.pop(0)):
            strike()

    before_asking(step)
    for number in range(num_rounds):
        pids = await processes(fleet)
        scheduler = await fleet.pid(0)
        (source,) = [engine_id for engine_id, found in pids.items() if scheduler in found]
        drain = Drain(fleet, pids, source, draw)
        begins = draw.randrange(1000)
        # Of about 4700 tokens, in a third of which an unhurried drain ends.
        dies = begins + draw.randrange(draw.choice([600, 3000]))
        kill = drain.kill_target if number % 2 else drain.kill_source
        strikes = [(begins, drain.begin), (dies, kill)]
        if during_copy := not is_hurried and number % 3 == 0:
            strikes.pop()  # which tokens come while streams are copied depends on the machine
            at_steps = [*[None] * draw.randrange(4), kill]
        assert await struck(front, strikes) == unfailed
        await drain.ended()
        assert drain.num_copied >= during_copy
        assert front.num_open == 0
        await until(lambda: not front._placement._copies.open)
        assert largest_share(tmp_path) <= SHARE_BYTES
        await fleet.engines.pop(0).close()
        await fleet.add()
        await processes(fleet)
        await all_at_rest(fleet)
    for engine in fleet.engines:
        await engine.close()
    assert largest_share(tmp_path) == 0, "what the dead have left is deleted"
