"""What happens at a time of its own, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from app.simulate.run.replica import INFINITY


class Timers:
    """Calls back in order of time; at equal times in the order of asking."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_asked = 0

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else INFINITY

    def at(self, time_s: float, act: Callable[[float], None]) -> None:
        self._num_asked += 1
        heapq.heappush(self._heap, (time_s, self._num_asked, act))

    def run_next(self) -> None:
        time_s, _, act = heapq.heappop(self._heap)
        act(time_s)
