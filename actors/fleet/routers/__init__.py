"""Which engine takes a request.

A router is a class that takes `(**options)`, and one row of `ROUTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actors.fleet.routers.base import Router
from actors.fleet.routers.simple import LeastLoaded, LongestPrefix, PowerOfTwo, RoundRobin
from actors.fleet.routers.slack import SlackRouter
from actors.scheduling.registry import build_part

__all__ = ["ROUTERS", "Router", "build_router"]

ROUTERS: Mapping[str, Callable[..., Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "prefix": LongestPrefix,
    "slack": SlackRouter,
}


def build_router(name: str, options: Mapping[str, Any] | None = None) -> Router:
    """The named router; raises ConfigError for a bad name or option."""
    return build_part("routing", name, ROUTERS, options or {})
