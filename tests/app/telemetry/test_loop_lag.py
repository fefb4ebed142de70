"""The replica's own measure of its event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from app.bench.chaos.probe import lag_between, read_samples
from app.telemetry.loop_lag import LoopLag
from app.telemetry.prometheus import render


def late_ticks(lag: LoopLag) -> Mapping[float, int]:
    return read_samples(render([], lag.registry).decode()).num_by_bound_s


class Told(LoopLag):
    """Says when it has ticked."""

    def __init__(self) -> None:
        super().__init__()
        self.ticked = asyncio.Event()

    def note(self, late_s: float, delay_s: float) -> None:
        super().note(late_s, delay_s)
        self.ticked.set()


async def test_a_loop_that_is_held_up_is_seen() -> None:
    lag = Told()
    lag.start()
    try:
        async with asyncio.timeout(30):
            await lag.ticked.wait()
            before = late_ticks(lag)
            asyncio.get_running_loop().call_soon(time.sleep, 0.3)
            await asyncio.sleep(0)  # now it has been slept on the loop, a tick long overdue
            lag.ticked.clear()
            await lag.ticked.wait()
    finally:
        lag.close()
    held_up = {b: n - before[b] for b, n in late_ticks(lag).items() if b > 0.2}
    assert sum(held_up.values()) == 1


def test_waits_for_a_core_are_not_the_loops() -> None:
    lag = LoopLag()
    before = read_samples(render([], lag.registry).decode())
    lag.note(late_s=0.5, delay_s=0.49)  # it would have run, had it been let
    lag.note(late_s=0.07, delay_s=0.0)
    after = read_samples(render([], lag.registry).decode())
    found = lag_between(before, after)
    assert {ms for ms, num in found["late_ticks_by_ms"].items() if num} == {"20", "80"}
    assert found["at_most_ms"] == 100  # the bucket's bound, and the tick before it
    assert found["waited_for_core_s"] == 0.49
