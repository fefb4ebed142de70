"""Serve's autoscaling policy: asks `actors.fleet.scaling` how many engines there should be.

In YAML, of the deployment `Engine`:

    autoscaling_config:
      policy:
        policy_function: app.fleet.autoscaling:Autoscaler
        policy_kwargs: {scaling: slack, ahead_s: 60}

It runs in Serve's controller, on what each engine says of itself (`record_autoscaling_stats`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

from actors.fleet.scaling import Bounds, Load, build_scaling

logger = logging.getLogger("ray.serve")


class Context(Protocol):
    """What is read of Serve's `AutoscalingContext`."""

    raw_metrics: Mapping[str, Mapping[Any, Any]] | None
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    current_time: float | None


class Autoscaler:
    """options: of the scaling; its bounds are the deployment's `min_replicas` and
    `max_replicas`."""

    def __init__(self, scaling: str = "slack", **options: Any) -> None:
        """Raises ConfigError for a bad name or option."""
        build_scaling(scaling, Bounds(), options)
        self._scaling = scaling
        self._options = options

    def __call__(self, context: Context) -> tuple[int, dict[str, float]]:
        """How many replicas, and what to remember."""
        bounds = Bounds(
            context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        )
        loads = loads_of(context.raw_metrics or {})
        now_s = time.time() if context.current_time is None else context.current_time
        state: Mapping[str, float] = getattr(context, "policy_state", None) or {}
        num_starting = max(0, context.target_num_replicas - len(loads))
        wanted, kept = build_scaling(self._scaling, bounds, self._options).wanted(
            loads, num_starting, 0, now_s, state
        )
        if wanted != context.target_num_replicas:
            logger.info("engines: %d, wanted: %d", context.target_num_replicas, wanted)
        return wanted, dict(kept)


def loads_of(metrics: Mapping[str, Mapping[Any, Any]]) -> dict[str, Load]:
    """The newest numbers of every engine that has told all of them."""
    newest: dict[str, dict[str, float]] = {}
    for name, of_replica in metrics.items():
        for replica, series in of_replica.items():
            if series:
                newest.setdefault(str(replica), {})[name] = series[-1].value
    loads = {}
    for replica, stats in newest.items():
        try:
            loads[replica] = Load.from_stats(stats)
        except KeyError:  # it has only begun to tell
            continue
    return loads
