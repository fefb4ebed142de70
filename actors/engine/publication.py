"""Publishes an engine's snapshots to its fronts.

Fronts route by them and treat a silent engine as dead, so an idle engine publishes too. Computing
the outlook touches much memory, so it is not done for every step.
"""

from __future__ import annotations

import asyncio
import time

from actors.engine.peers import Peers
from actors.fleet.publish import Publisher
from actors.fleet.snapshot import EngineState
from actors.scheduling.core import Core

BUSY_PERIOD_S = 0.25
IDLE_PERIOD_S = 1.0


class Publication:
    """Publishes from `start` on; the owner gets the snapshots too, for scaling."""

    def __init__(self, core: Core, publisher: Publisher, peers: Peers) -> None:
        self._core = core
        self._publisher = publisher
        self._peers = peers
        self._state = EngineState.SERVING
        self._is_leaving = False
        self._seen = (-1, -1)
        self._last_s = 0.0

    @property
    def num_fronts(self) -> int:
        """Fronts that are connected."""
        return self._peers.num_fronts

    def start(self) -> None:
        asyncio.get_running_loop().call_later(BUSY_PERIOD_S, self._tick)

    def _tick(self) -> None:
        self.start()
        activity = (self._core.num_steps, self._core.view.num_waiting)
        if activity != self._seen or time.monotonic() - self._last_s >= IDLE_PERIOD_S:
            self._seen = activity
            self.publish()

    def publish(self, to: int | None = None) -> None:
        """Publish now, to all fronts or to one."""
        self._last_s = time.monotonic()
        self._peers.publish(self._publisher.snapshot(self._last_s, self._state), to)
        if to is not None:
            self._peers.send(to, self._publisher.prefixes())
        elif (update := self._publisher.prefix_update()) is not None:
            self._peers.broadcast(update)

    def holds_adapters(self, adapters: tuple[tuple[int, str], ...]) -> None:
        """Publish what the adapter slots hold, as `EngineSnapshot.adapters`."""
        self._publisher.adapters = adapters
        self.publish()

    def computes(self, is_ready: bool) -> None:
        """Set whether steps are executed; otherwise the engine takes no requests."""
        self._become(EngineState.SERVING if is_ready else EngineState.STARTING)

    def leave(self) -> None:
        """Take no new requests."""
        self._is_leaving = True
        self._become(EngineState.DRAINING)

    def _become(self, state: EngineState) -> None:
        self._state = EngineState.DRAINING if self._is_leaving else state
        self.publish()
