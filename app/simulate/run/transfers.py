"""KV that simulated engines fetch from each other, as their cores say (`scheduling.second_tier`).

A core saves the blocks it completes; that takes no time here, and what is saved is taken to be in
its engine's memory for as long as that is not given to others. It fetches blocks by their digests,
from whichever engine has them, over both ends' links. What has not come when its engine has gone is
lost, and computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from actors.scheduling.events import Fetch, KVMove, Moved, Save
from app.simulate.hardware.interconnect import Links
from app.simulate.run.engine import SimulatedEngine
from app.simulate.run.replica import Replica


class Transfers:
    """engines: those alive, by name. touched: an engine's next event may have changed. at: calls
    back at a time."""

    def __init__(
        self,
        links: Links,
        kv_bytes_per_token: float,
        engines: Mapping[str, SimulatedEngine],
        touched: Callable[[Replica, float], None],
        at: Callable[[float, Callable[[float], None]], None],
    ) -> None:
        self.links = links
        self.num_open = 0  # fetches under way
        self._kv_bytes_per_token = kv_bytes_per_token
        self._engines = engines
        self._touched = touched
        self._at = at

    def watch(self, engine: SimulatedEngine) -> None:
        """Carry out what this engine's core wants moved."""
        engine.replica.on_move = partial(self._begin, engine)

    def _begin(self, engine: SimulatedEngine, move: KVMove, now_s: float) -> None:
        if not isinstance(move, Fetch):
            num_blocks = len(move.blocks) if isinstance(move, Save) else 0
            engine.replica.submit(Moved(move.move_id, num_blocks), now_s)
            return
        digests = [digest for _, digest in move.blocks]
        sources: list[tuple[SimulatedEngine, int]] = []  # and how many blocks it sends
        num_found, arrives_s = 0, now_s
        while num_found < len(digests):
            source, count = self._holder(engine, digests[num_found:])
            if source is None:
                break
            num_bytes = count * engine.replica.core.config.block_size * self._kv_bytes_per_token
            arrives_s = self.links.send(source.name, engine.name, num_bytes, now_s)
            if arrives_s > now_s + move.limit_s:
                arrives_s = now_s + move.limit_s
                break
            num_found += count
            sources.append((source, count))
        self.num_open += 1
        self._at(arrives_s, partial(self._arrived, engine, move, sources))

    def _holder(
        self, engine: SimulatedEngine, digests: Sequence[bytes]
    ) -> tuple[SimulatedEngine | None, int]:
        """Another engine that has most of these from the first on; None: none has the first."""
        found: tuple[SimulatedEngine | None, int] = None, 0
        for other in self._engines.values():
            if other is not engine:
                memory = other.replica.core.requests.running.block_manager
                count = len(memory.match(digests))
                if count > found[1]:
                    found = other, count
        return found

    def _arrived(
        self,
        engine: SimulatedEngine,
        move: Fetch,
        sources: Sequence[tuple[SimulatedEngine, int]],
        now_s: float,
    ) -> None:
        self.num_open -= 1
        if self._engines.get(engine.name) is not engine:
            return
        num_blocks = 0
        for source, count in sources:
            if self._engines.get(source.name) is not source:
                break
            num_blocks += count
        engine.replica.submit(Moved(move.move_id, num_blocks), now_s)
        self._touched(engine.replica, now_s)
