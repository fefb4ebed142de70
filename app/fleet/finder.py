"""Finds the engines of a fleet and connects a front to each."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from app.fleet.connection import Connection, Owner
from app.fleet.registry import EngineEntry, Registry

logger = logging.getLogger("legato.fleet")

_PERIOD_S = 1.0
_COUNT_PERIOD_S = 0.2
_REPORT_AGAIN_S = 5.0
_FORGET_AFTER_S = 30.0  # an entry that its engine does not repeat
_LOOKED_WITHIN_S = 15.0  # looks at an entry that are further apart do not tell that


class ConnectionOwner(Owner, Protocol):
    def joined(self, connection: Connection) -> None: ...
    def is_connected(self, engine_id: str) -> bool: ...


class Finder:
    """Reads the registry once a second, and at once after `refresh` or `lost`.

    serves: as in `EngineEntry`, of the engines that are connected. others: those that serve
    something else, as while a new model is deployed.
    """

    def __init__(self, registry: Registry, node: str, serves: str = "") -> None:
        self._registry = registry
        self._node = node
        self._serves = serves
        self.others: dict[str, EngineEntry] = {}
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._refreshed = asyncio.Event()
        self._connecting: dict[str, asyncio.Task[None]] = {}
        # Of engines without a connection: the entry, since when it is so, and the last look at it.
        self._repeats: dict[str, tuple[EngineEntry, float, float]] = {}
        self._lost_s: dict[str, float] = {}  # engine -> when its connection ended
        self._unreadable: set[str] = set()
        self._front_id = secrets.token_hex(6)
        self._reported_waiting, self._reported_at_s = 0, 0.0

    def start(self, owner: ConnectionOwner) -> None:
        self._task = asyncio.create_task(self._run(owner))

    def refresh(self) -> None:
        """Read again soon: the set of engines may have changed."""
        self._wake.set()

    def lost(self, engine_id: str) -> None:
        """Look at once for what takes its place. It is tried again itself after a pause, as what
        ended the connection may end the next one as soon."""
        self._lost_s[engine_id] = time.monotonic()
        self._wake.set()

    async def refreshed(self) -> None:
        """Returns once every engine of the first read is connected or has failed to connect."""
        await self._refreshed.wait()
        if self._connecting:
            await asyncio.wait(self._connecting.values())

    async def outnumbered(self, num_own: Callable[[], int]) -> None:
        """Returns once as many own engines take requests as serve something else. That comes to be:
        replaced engines leave. Of those of an older Legato, whose entries may stay, one counts."""
        is_told = False
        while (num := num_own()) < (num_others := self._num_others()):
            if not is_told:
                why = f"waits for engines that serve {self._serves}"
                logger.info("%s: there are %d of %d", why, num, num_others)
            is_told = True
            await asyncio.sleep(_COUNT_PERIOD_S)

    def _num_others(self) -> int:
        repeated = [entry for entry in self.others.values() if entry.num_repeats is not None]
        return len(repeated) or min(1, len(self.others))

    async def report_waiting(self, count: int) -> None:
        """Publish for the autoscaler how many requests wait for an engine to start."""
        now_s = time.monotonic()
        if count == self._reported_waiting and (
            not count or now_s - self._reported_at_s < _REPORT_AGAIN_S
        ):
            return
        await self._registry.report_waiting(self._front_id, count)
        self._reported_waiting, self._reported_at_s = count, now_s

    async def close(self) -> None:
        for task in (self._task, *self._connecting.values()):
            if task is not None:
                task.cancel()

    async def _run(self, owner: ConnectionOwner) -> None:
        while True:
            try:
                await self._refresh(owner)
                self._refreshed.set()
            except Exception as error:  # the cluster's store is down: connections stay
                self._repeats.clear()
                logger.warning("looking for engines: %s: %s", type(error).__name__, error)
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_S):  # `wait_for` may lose a cancellation
                    await self._wake.wait()

    async def _refresh(self, owner: ConnectionOwner) -> None:
        engine_ids = await self._registry.ids()
        self.others = {i: entry for i, entry in self.others.items() if i in engine_ids}
        self._repeats = {i: known for i, known in self._repeats.items() if i in engine_ids}
        self._unreadable &= set(engine_ids)
        lately_s = time.monotonic() - _PERIOD_S
        self._lost_s = {lost: at_s for lost, at_s in self._lost_s.items() if at_s > lately_s}
        for engine_id in engine_ids:
            is_tried = engine_id in self._connecting or engine_id in self._lost_s
            if not owner.is_connected(engine_id) and not is_tried:
                task = asyncio.create_task(self._connect(engine_id, owner))
                self._connecting[engine_id] = task

    async def _connect(self, engine_id: str, owner: ConnectionOwner) -> None:
        try:
            entry = await self._registry.get(engine_id)
            if entry is None:
                return
            if entry.serves != self._serves:
                if engine_id not in self.others:
                    logger.info("engine %s is not used: it serves %r", engine_id, entry.serves)
                self.others[engine_id] = entry
                await self._forget_if_dead(entry)
                return
            connection = Connection(entry, self._node, owner)
            try:
                await connection.connect()
            except (OSError, TimeoutError) as error:
                connection.close()
                if engine_id not in self._repeats:
                    logger.warning("engine %s cannot be reached: %s", engine_id, error)
                await self._forget_if_dead(entry)
                return
            self._repeats.pop(engine_id, None)
            logger.info("engine %s has joined", engine_id)
            owner.joined(connection)
        except Exception:  # such as an entry that cannot be read
            if engine_id not in self._unreadable:
                logger.exception("connecting to engine %s", engine_id)
            self._unreadable.add(engine_id)
        finally:
            self._connecting.pop(engine_id, None)

    async def _forget_if_dead(self, entry: EngineEntry) -> None:
        """Drop an entry that is no longer repeated. One that is may be out of reach for this front
        alone. No clocks of nodes are compared: what counts is for how long it has seen no repeat,
        while the store answered, without which none can be made."""
        now_s = time.monotonic()
        known, since_s, looked_s = self._repeats.get(entry.engine_id, (entry, now_s, now_s))
        if known != entry or now_s - looked_s > _LOOKED_WITHIN_S:
            since_s = now_s
        self._repeats[entry.engine_id] = (entry, since_s, now_s)
        if entry.num_repeats is not None and now_s - since_s > _FORGET_AFTER_S:
            await self._registry.drop(entry.engine_id)
