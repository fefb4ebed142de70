"""The simulated deployment: its engines, routing, scaling and failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.fleet.scaling import Bounds
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from app.simulate.hardware.step_ratios import StepRatios


@dataclass(frozen=True, slots=True)
class Autoscale:
    """scaling, options: the policy, a row of `SCALINGS`. interval_s: time between decisions.

    start_s: from the decision until a new engine serves. drain_s: how long a draining engine may
    continue its streams; longer ones move at once.
    """

    scaling: str = "slack"
    options: Mapping[str, Any] = field(default_factory=dict)
    bounds: Bounds = field(default_factory=Bounds)
    interval_s: float = 10.0
    start_s: float = 60.0
    drain_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """The settings of a simulation.

    model: the actual step times. believed: the cores' cost model (None: `model`).
    jitter: sigma of the log-normal noise on step times. host_s, ratios: see `Replica`.
    routing, routing_options: a row of `ROUTERS`.
    publish_s, delay_s: interval between an engine's snapshots, and their delay to the front.
    num_retries: further engines tried after a refusal.
    failures: (time, engine): engines, numbered by start, that die and lose all state.
    """

    config: SchedulerConfig
    model: CostModel
    believed: CostModel | None = None
    num_replicas: int = 1
    routing: str = "round_robin"
    routing_options: Mapping[str, Any] = field(default_factory=dict)
    autoscale: Autoscale | None = None
    publish_s: float = 0.25
    delay_s: float = 0.02
    num_retries: int = 2
    failures: tuple[tuple[float, int], ...] = ()
    jitter: float = 0.0
    host_s: float = 0.0
    ratios: StepRatios | None = None

    @property
    def is_lone(self) -> bool:
        """Whether there is one engine throughout, so no routing."""
        return self.num_replicas == 1 and self.autoscale is None and not self.failures
