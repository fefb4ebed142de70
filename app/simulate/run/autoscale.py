"""How many replicas there should be, decided from the state of their cores.

Two signals: requests per replica (what Ray Serve scales on), and prefill tokens of work ahead per
replica, which a new request's first token waits for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from app.simulate.run.replica import Replica


@dataclass(frozen=True, slots=True)
class AutoscalePolicy:
    """start_s: cold start of a replica. downscale_delay_s: calm needed before one is drained.

    signal "requests": aims at `target` live requests a replica.
    signal "backlog": aims at `target` prefill tokens of work ahead a replica.
    """

    min_replicas: int = 1
    max_replicas: int = 16
    signal: str = "requests"
    target: float = 16.0
    interval_s: float = 10.0
    start_s: float = 60.0
    downscale_delay_s: float = 300.0

    def __post_init__(self) -> None:
        if self.signal not in ("requests", "backlog"):
            raise ValueError(f"unknown signal {self.signal!r}; known: backlog, requests")
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError("need 1 <= min_replicas <= max_replicas")


class Autoscaler:
    """Decides every `interval_s`; up at once, down only after `downscale_delay_s` of calm."""

    def __init__(self, policy: AutoscalePolicy) -> None:
        self.policy = policy
        self.next_s = policy.interval_s
        self._calm_since_s: float | None = None

    def decide(self, now_s: float, replicas: Sequence[Replica], num_starting: int) -> int:
        """The number of replicas wanted now."""
        policy = self.policy
        self.next_s = now_s + policy.interval_s
        if policy.signal == "requests":
            load = sum(r.num_live for r in replicas)
        else:
            load = sum(r.prefill_backlog_tokens() for r in replicas)
        have = len(replicas) + num_starting
        wanted = math.ceil(load / policy.target) if load else 0
        wanted = max(policy.min_replicas, min(policy.max_replicas, wanted))
        if wanted >= have:
            self._calm_since_s = None
            return wanted
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        if now_s - self._calm_since_s < policy.downscale_delay_s:
            return have
        return wanted
