"""A way of dividing the work as a router: what live fronts use."""

from __future__ import annotations

from collections.abc import Sequence

from actors.fleet.fleet import Fleet, FleetEngine, Prospect
from actors.fleet.roles import Way
from actors.fleet.routers.base import Router
from actors.fleet.snapshot import Arrival, EngineSnapshot, Role


class WayRouter(Router):
    """Prompts and streams go to engines whose role it is, by the roles that engines publish.

    A role is a preference: while no engine of the role can take a request, any other does.
    """

    def __init__(self, way: Way) -> None:
        self.way = way

    def choose(self, arrival: Arrival, fleet: Fleet, now_s: float) -> Prospect | None:
        roles = {name: engine.snapshot.role for name, engine in fleet.engines.items()}
        if arrival.has_begun:
            engine = self.way.receiver(arrival, roles, fleet, now_s)
            if engine is not None:
                return fleet.prospects(arrival, (engine,))[0]
        else:
            placement = self.way.place(arrival, roles, fleet, now_s)
            if placement is not None:
                return placement.prompt
        return self.way.router.choose(arrival, fleet, now_s)

    def pick(
        self, engines: Sequence[FleetEngine], arrival: Arrival, fleet: Fleet, now_s: float
    ) -> FleetEngine | Prospect:
        return self.way.router.pick(engines, arrival, fleet, now_s)


def hands_over(arrival: Arrival, engine_id: str, fleet: Fleet) -> bool:
    """Whether the engine that gets this arrival computes its prompt and first token only.

    Another engine must then be there to continue the stream, with the same bits.
    """
    here = fleet.engines.get(engine_id)
    if here is None or here.snapshot.role is not Role.PREFILL:
        return False
    if arrival.has_begun or arrival.max_tokens < 2:
        return False
    return any(
        engine.snapshot.role.decodes
        and engine.snapshot.bits == here.snapshot.bits
        and _holds(engine.snapshot, arrival)
        for engine in fleet.candidates(arrival)
    )


def _holds(snapshot: EngineSnapshot, arrival: Arrival) -> bool:
    """Whether the whole stream fits the engine's KV cache: else the request is refused at once,
    by an engine that gets it whole."""
    longest = min(arrival.num_tokens + arrival.max_tokens, snapshot.max_model_len) - 1
    return longest <= snapshot.num_blocks * snapshot.block_size
