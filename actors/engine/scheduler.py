"""The scheduler actor: what Ray sees of the engine loop.

It is not an asyncio actor. Ray would run the loop in a thread beside the main one, and the main
thread of an idle actor wakes a hundred times a second to look for signals (0.6 % of a core). So the
loop runs on the main thread, `serve` does not return while the replica lives, and the replica sends
its requests and questions over their socket.

Ray also wraps every method of an actor's class, private ones included, for tracing, and reads its
settings at each call: what runs in every iteration is in a plain class (`loop.EngineLoop`).
"""

from __future__ import annotations

from typing import Any

import uvloop

from actors.engine.assembly import Engine
from actors.engine.config import EngineConfig
from actors.engine.peers import FrontAddress
from actors.stage.spec import StageInfo


class SchedulerActor:
    """One per replica."""

    def __init__(self, config: EngineConfig, stages: list[list[Any]]) -> None:
        """stages: actors [stage][rank] that the replica has created at the same time."""
        self._loop = uvloop.new_event_loop()
        self._engine = Engine(config, stages)

    def start(
        self, socket_path: str, fronts: FrontAddress | None = None
    ) -> tuple[StageInfo, int, str | None]:
        """Load the stages, size the KV cache, connect to the replica's socket, let fronts in.

        Returns what a rank reports, the number of KV blocks, and where fronts connect by TCP."""
        return self._loop.run_until_complete(self._engine.start(socket_path, fronts))

    def serve(self) -> None:
        """Called once after `start`; returns when the replica has closed its socket and the stages
        have ended."""
        self._loop.run_until_complete(self._engine.finished())
