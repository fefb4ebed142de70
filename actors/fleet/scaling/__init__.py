"""How many engines there should be.

A scaling is a class that takes `(**options)`, and one row of `SCALINGS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actors.fleet.scaling.base import Bounds, EngineLoad, Scaling, load_of, serving
from actors.fleet.scaling.queue import QueueLength
from actors.fleet.scaling.slack import SlackScaling
from actors.scheduling.registry import build_part

__all__ = [
    "SCALINGS",
    "Bounds",
    "EngineLoad",
    "Scaling",
    "build_scaling",
    "load_of",
    "serving",
]

SCALINGS: Mapping[str, Callable[..., Scaling]] = {
    "slack": SlackScaling,
    "queue_length": QueueLength,
}


def build_scaling(name: str, options: Mapping[str, Any] | None = None) -> Scaling:
    """The named scaling policy. Raises ConfigError for a bad name or option."""
    return build_part("scaling", name, SCALINGS, options or {})
