"""The simulated deployment: its engines, routing, scaling and failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from actors.fleet.scaling import Bounds
from actors.fleet.snapshot import Role
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from app.simulate.hardware.interconnect import Interconnect
from app.simulate.hardware.step_ratios import StepRatios
from app.simulate.run.acceptance import Acceptance

_HAS_STATES = "layers of this model keep states, without which KV continues no request"


def divided_memory(model: CostModel, max_requests: int) -> tuple[int, int]:
    """Of so many requests those whose states fit, where layers keep states, and the tokens of KV
    beside these: as an engine divides its memory (`EngineConfig.cache_sizes`)."""
    if not model.state_tokens:
        return max_requests, model.kv_tokens
    most = max(1, model.num_states, model.kv_tokens // 2 // model.state_tokens)
    num_requests = min(max_requests, most)
    return num_requests, model.kv_tokens - num_requests * model.state_tokens


def with_prefix_cache(config: SchedulerConfig, prefix_cache: bool) -> SchedulerConfig:
    """With it, as many states are saved as there are requests, where layers keep any."""
    num_states = config.num_saved_states
    if num_states is not None:
        num_states = config.max_requests if prefix_cache else 0
    return replace(config, prefix_cache=prefix_cache, num_saved_states=num_states)


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
class Division:
    """Prompts and streams divided over the engines by a row of `WAYS`.

    num_prefill: engines, of the deployment's, that only compute prompts.
    interconnect, kv_bytes_per_token: what moves KV, and how much of it a token has.
    ahead: KV moves chunk by chunk while its prompt is computed, as live; else with the first token.
    shares_prefixes: requests find each other's KV; for workloads whose tokens are not blank.
    """

    way: str
    num_prefill: int
    interconnect: Interconnect
    kv_bytes_per_token: float
    options: Mapping[str, Any] = field(default_factory=dict)
    ahead: bool = True
    shares_prefixes: bool = False

    def config_of(self, role: Role, config: SchedulerConfig) -> SchedulerConfig:
        """The settings of an engine, those of a live one of its role: KV that moves has names, by
        which it is found on arrival."""
        config = with_prefix_cache(config, self.num_prefill > 0 or self.shares_prefixes)
        return config.handing_over() if role is Role.PREFILL else config


@dataclass(frozen=True, slots=True)
class SharedKV:
    """Engines fetch each other's KV (`kv.shared_cache_gib` of live ones). As of `Division`."""

    interconnect: Interconnect
    kv_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """The settings of a simulation.

    model: the actual step times. believed: the cores' cost model (None: `model`).
    jitter: sigma of the log-normal noise on step times. host_s, ratios: see `Replica`.
    routing, routing_options: a row of `ROUTERS`.
    publish_s, delay_s: interval between an engine's snapshots, and their delay to the front.
    rebalance: what is late at one engine goes on at another of its role, as in live fleets by
        default.
    failures: (time, engine): engines, numbered by start, that die and lose all state.
    drains: likewise those that leave, as at a rolling update of a live fleet.
    shared_kv: KV moves with the streams that leave an engine; None: it is computed again.
    acceptance: probability that a draft is right; None: engines run without a drafter.
    division: None: colocated. It takes no autoscaling, failures, drains or shared KV.
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
    rebalance: bool = False
    failures: tuple[tuple[float, int], ...] = ()
    drains: tuple[tuple[float, int], ...] = ()
    shared_kv: SharedKV | None = None
    jitter: float = 0.0
    host_s: float = 0.0
    ratios: StepRatios | None = None
    acceptance: float | None = None
    division: Division | None = None

    def __post_init__(self) -> None:
        if self.acceptance is not None:
            if not 0.0 <= self.acceptance <= 1.0:
                raise ValueError(f"acceptance: a probability, not {self.acceptance:g}")
            if self.config.drafter == "none":
                raise ValueError("acceptance has no effect with the drafter 'none'")
        if self.config.num_saved_states is not None:
            moves = self.division is not None and self.division.num_prefill > 0
            for name, has in (("acceptance", self.acceptance), ("shared_kv", self.shared_kv)):
                if has is not None:
                    raise ValueError(f"{name}: {_HAS_STATES}")
            if moves:
                raise ValueError(f"division: {_HAS_STATES}")
        if self.shared_kv is not None:
            if not self.config.prefix_cache:
                raise ValueError("shared_kv needs prefix_cache: KV is found by its digest")
            if not (self.rebalance or self.drains or self.autoscale):
                raise ValueError(
                    "shared_kv has no effect: nothing moves without rebalance or drains"
                )
        if self.division is not None:
            for name in ("autoscale", "failures", "drains", "shared_kv"):
                if getattr(self, name):
                    raise ValueError(f"{name} has no effect with engines divided by roles")
            if self.config.prefix_cache:
                raise ValueError("engines divided by roles share no prefixes: prefix_cache")

    def drafting(
        self, config: SchedulerConfig, seed: int
    ) -> tuple[SchedulerConfig, Acceptance | None]:
        """The settings of an engine that has these, and what becomes of its drafts."""
        if self.acceptance is None:  # tokens are blanks, in which every lookup would be right
            return config.without_drafts(), None
        return config, Acceptance(self.acceptance, seed)

    @property
    def is_lone(self) -> bool:
        """Whether there is one engine throughout, so no routing."""
        plain = self.autoscale is None and self.division is None
        return self.num_replicas == 1 and plain and not (self.failures or self.drains)
