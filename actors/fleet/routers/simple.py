"""Routers that are common elsewhere, for comparison."""

from __future__ import annotations

from collections.abc import Sequence

from actors.fleet.fleet import Fleet, FleetEngine
from actors.fleet.routers.base import Router
from actors.fleet.snapshot import Arrival
from actors.scheduling.registry import within

_64_BITS = (1 << 64) - 1


class RoundRobin(Router):
    """The engines in turn: the one to which nothing was sent for longest. Asking takes no turn."""

    def pick(
        self, engines: Sequence[FleetEngine], arrival: Arrival, fleet: Fleet, now_s: float
    ) -> FleetEngine:
        return min(engines, key=lambda engine: engine.last_sent)


class LeastLoaded(Router):
    """The engine with the fewest unfinished requests."""

    def pick(
        self, engines: Sequence[FleetEngine], arrival: Arrival, fleet: Fleet, now_s: float
    ) -> FleetEngine:
        return min(engines, key=lambda engine: engine.num_live)


class PowerOfTwo(Router):
    """The less loaded of two engines drawn at random."""

    def __init__(self, seed: int = 0) -> None:
        self._state = seed & _64_BITS

    def pick(
        self, engines: Sequence[FleetEngine], arrival: Arrival, fleet: Fleet, now_s: float
    ) -> FleetEngine:
        if len(engines) == 1:
            return engines[0]
        first = self._draw(len(engines))
        second = self._draw(len(engines) - 1)
        a, b = engines[first], engines[second + (second >= first)]
        return a if a.num_live <= b.num_live else b

    def _draw(self, below: int) -> int:
        """The next of a fixed sequence (splitmix64), scaled; pure code has no other randomness."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _64_BITS
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64_BITS
        return ((mixed ^ (mixed >> 31)) * below) >> 64


class LongestPrefix(Router):
    """The engine that holds most of the prompt, however busy; the least loaded where none does.

    least_share: a hit below this share of the prompt counts as none.
    """

    def __init__(self, least_share: float = 0.1) -> None:
        within(0.0, 1.0, least_share=least_share)
        self._least_share = least_share

    def pick(
        self, engines: Sequence[FleetEngine], arrival: Arrival, fleet: Fleet, now_s: float
    ) -> FleetEngine:
        cached = fleet.num_cached_tokens(arrival)
        least = self._least_share * arrival.num_tokens

        def rank(engine: FleetEngine) -> tuple[int, int]:
            held = cached.get(engine.engine_id, 0)
            return (-held if held >= least else 0, engine.num_live)

        return min(engines, key=rank)
