"""What a router is: which engine takes an arrival."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from actors.fleet.fleet import Fleet, FleetEngine, Prospect
from actors.fleet.snapshot import Arrival


class Router(ABC):
    """Decides from the picture and the arrival alone; the caller then notes it with `Fleet.sent`.

    reads_outlook: snapshots without an outlook would change what it does.
    """

    reads_outlook: ClassVar[bool] = False

    def choose(self, arrival: Arrival, fleet: Fleet, now_s: float) -> Prospect | None:
        """Where it goes, and what is expected there; None: no engine can take it now."""
        engines = fleet.candidates(arrival)
        if not engines:
            return None
        chosen = self.pick(engines, arrival, fleet, now_s)
        if isinstance(chosen, Prospect):
            return chosen
        return fleet.prospects(arrival, (chosen,))[0]

    @abstractmethod
    def pick(
        self, engines: Sequence[FleetEngine], arrival: Arrival, fleet: Fleet, now_s: float
    ) -> FleetEngine | Prospect:
        """One of `engines`, of which there is at least one."""
