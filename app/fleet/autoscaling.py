"""Serve's autoscaling policy, computed by `actors.fleet.scaling`.

In YAML, of the deployment `Engine`:

    autoscaling_config:
      policy:
        policy_function: app.fleet.autoscaling:Autoscaler
        policy_kwargs: {scaling: slack, ahead_s: 60}

It runs in Serve's controller, on the loads that engines report (`record_autoscaling_stats`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

from actors.fleet.scaling import Bounds, EngineLoad, build_scaling, serving
from app.fleet.registry import Registry, registry_of

logger = logging.getLogger("ray.serve")
_READ_EVERY_S = 1.0


class ServeContext(Protocol):
    """The fields of Serve's `AutoscalingContext` that are used."""

    raw_metrics: Mapping[str, Mapping[Any, Any]] | None
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    app_name: str
    deployment_name: str


class Autoscaler:
    """options: of the scaling; its bounds are the deployment's `min_replicas` and
    `max_replicas`."""

    def __init__(self, scaling: str = "slack", **options: Any) -> None:
        """Raises ConfigError for a bad name or option."""
        self._scaling = build_scaling(scaling, options)
        self._registry: Registry | None = None
        self._num_waiting, self._read_s = 0, -math.inf

    def __call__(self, context: ServeContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas. State is kept here: Serve makes one object per deployment."""
        bounds = Bounds(
            context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        )
        loads = loads_of(context.raw_metrics or {})
        now_s = time.monotonic()  # the wall clock of the context may step back
        num_starting = max(0, context.target_num_replicas - len(serving(loads)))
        num_queued = self._read_num_queued(context, now_s)
        wanted = self._scaling.wanted(loads, num_starting, num_queued, now_s, bounds)
        if wanted != context.target_num_replicas:
            logger.info("engines: %d, wanted: %d", context.target_num_replicas, wanted)
        return wanted, {}

    def _read_num_queued(self, context: ServeContext, now_s: float) -> int:
        """Requests that wait for an engine to start: fronts report them where there may be none.

        Serve's controller calls ten times a second; the cluster's store is read once a second.
        """
        if context.capacity_adjusted_min_replicas > 0:
            return 0
        if now_s - self._read_s >= _READ_EVERY_S:
            if self._registry is None:  # kept, as it remembers what each front has reported
                self._registry = registry_of(context.app_name, context.deployment_name)
            try:
                self._num_waiting = self._registry.num_waiting(now_s)
            except Exception as error:  # without the store the last number is kept
                logger.warning(
                    "reading the number of waiting requests: %s: %s", type(error).__name__, error
                )
            self._read_s = now_s
        return self._num_waiting


def loads_of(metrics: Mapping[str, Mapping[Any, Any]]) -> dict[str, EngineLoad]:
    """The newest numbers of every engine that has reported all of them."""
    newest: dict[str, dict[str, float]] = {}
    for name, of_replica in metrics.items():
        for replica, series in of_replica.items():
            if series:
                newest.setdefault(str(replica), {})[name] = series[-1].value
    loads = {}
    for replica, stats in newest.items():
        try:
            loads[replica] = EngineLoad.from_stats(stats)
        except KeyError:  # its first report is incomplete
            continue
    return loads
