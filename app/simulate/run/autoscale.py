"""A simulated fleet's scaling policy at work: engines start, after their cold start, and drain."""

from __future__ import annotations

from collections.abc import Mapping

from actors.fleet.scaling import EngineLoad, build_scaling, load_of
from app.simulate.run.deployment import Autoscale
from app.simulate.run.fleet import SimulatedFleet


class Scaler:
    """Starts and drains engines of a fleet by its timers, from construction on.

    num_starting: engines that are wanted and do not serve yet. decisions: (time, engines wanted).
    loads: those that each decision was made from.
    """

    def __init__(self, fleet: SimulatedFleet, autoscale: Autoscale) -> None:
        self._fleet = fleet
        self._autoscale = autoscale
        self._policy = build_scaling(autoscale.scaling, autoscale.options)
        self.num_starting = 0
        self.decisions: list[tuple[float, int]] = []
        self.loads: list[Mapping[str, EngineLoad]] = []
        fleet.timers.at(autoscale.interval_s, self._scale)

    def _scale(self, now_s: float) -> None:
        fleet, scale = self._fleet, self._autoscale
        fleet.timers.at(now_s + scale.interval_s, self._scale)
        loads = {
            name: load_of(engine.publisher.snapshot(now_s, engine.state), now_s)
            for name, engine in fleet.engines.items()
        }
        num_queued = len(fleet.queued)
        wanted = self._policy.wanted(loads, self.num_starting, num_queued, now_s, scale.bounds)
        self.decisions.append((now_s, wanted))
        self.loads.append(loads)
        serving = [engine for engine in fleet.engines.values() if engine.accepts]
        for _ in range(wanted - len(serving) - self.num_starting):
            self.num_starting += 1
            fleet.timers.at(now_s + scale.start_s, self._started)
        if self.num_starting == 0 and len(serving) > wanted:
            serving.sort(key=lambda engine: engine.replica.num_live)
            for engine in serving[: len(serving) - wanted]:
                fleet.drain(engine, scale.drain_s, now_s)

    def _started(self, now_s: float) -> None:
        self.num_starting -= 1
        self._fleet.start(now_s)
