"""The scheduler actor: what Ray sees of the engine loop.

Ray wraps every method of an actor's class for its tracing, private ones as well, and consults its
settings at each call. What runs for every iteration therefore lives in a plain class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.engine_config import EngineConfig
from actors.engine_loop import EngineLoop
from actors.stage.spec import StageInfo


class SchedulerActor:
    """One per replica."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop = EngineLoop(config)

    async def start(self, socket_path: str) -> tuple[StageInfo, int]:
        """Load the stages, size the KV cache, connect to the replica's socket.

        Returns what a rank reports and the number of KV blocks."""
        return await self._loop.start(socket_path)

    def loading_progress(self) -> float:
        """The slowest rank's share of loading, 0 to 1."""
        return self._loop.stages.progress

    async def reconfigure(self, changes: Mapping[str, Any]) -> str | None:
        """Change scheduling settings live; returns what is wrong with them, if anything."""
        return self._loop.reconfigure(changes)

    def status(self) -> dict[str, Any]:
        """A snapshot for the console: plain data."""
        return self._loop.status()

    def stage_pids(self) -> list[list[int]]:
        """Process ids of the stage ranks, [stage][rank]."""
        return self._loop.stages.pids

    def stop(self) -> None:
        """End the stages and the connection to the replica."""
        self._loop.stop()
