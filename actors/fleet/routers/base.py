"""The interface of routers, which choose the engine of an arrival."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from actors.fleet.fleet import Fleet, FleetEngine, Prospect
from actors.fleet.snapshot import Arrival


class Router(ABC):
    """Decides from fleet and arrival alone; the caller then records the choice with `Fleet.sent`.

    reads_outlook: whether it needs the outlook of the snapshots.
    """

    reads_outlook: ClassVar[bool] = False

    def choose(self, arrival: Arrival, fleet: Fleet, now_s: float) -> Prospect | None:
        """The chosen engine with its predictions; None: no engine can take the request now.

        The engine that fetches its KV already (`expected_by`) is chosen if it has a place."""
        engines = fleet.candidates(arrival)
        if not engines:
            return None
        for engine in engines:
            has_place = engine.num_live < engine.snapshot.max_requests
            if engine.engine_id == arrival.expected_by and has_place:
                return fleet.prospects(arrival, (engine,))[0]
        chosen = self.pick(engines, arrival, fleet, now_s)
        if isinstance(chosen, Prospect):
            return chosen
        return fleet.prospects(arrival, (chosen,))[0]

    @abstractmethod
    def pick(
        self, engines: Sequence[FleetEngine], arrival: Arrival, fleet: Fleet, now_s: float
    ) -> FleetEngine | Prospect:
        """One of `engines`, which is not empty."""
