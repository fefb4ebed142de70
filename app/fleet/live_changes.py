"""Changes of settings that a front makes live: to the engines there are, and to those that join."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from actors.scheduling.live_changes import merged
from actors.transport.background_tasks import BackgroundTasks
from app.engine_client.client import EngineUnavailable, RequestRefused
from app.fleet.connection import Connection
from app.fleet.stream_placement import RETRY_AFTER_S

logger = logging.getLogger("legato.fleet")


class LiveChanges:
    """What was accepted is kept as one change: it stays small, and no other change can come between
    its parts. order: with which engines start."""

    def __init__(self, order: str = "auto") -> None:
        self._order = order
        self._accepted: dict[str, Any] = {}
        self._tasks = BackgroundTasks()

    async def make(
        self, changes: Mapping[str, Any], connections: Callable[[], Sequence[Connection]]
    ) -> None:
        """As `EngineClient.reconfigure`: what one engine refuses, none of them makes. connections:
        the open ones."""
        asked = connections()
        if not asked:
            raise EngineUnavailable("there is no engine", retry_after_s=RETRY_AFTER_S)
        await _all([connection.try_changes(changes) for connection in asked])
        await _all([connection.reconfigure(changes) for connection in asked])
        # An engine that has not answered gets them when it joins again.
        self._accepted = merged(self._accepted, changes, self._order)
        for connection in connections():
            if connection not in asked:  # it joined in the meantime
                self.catch_up(connection)

    def catch_up(self, connection: Connection) -> None:
        """Send an engine that has joined what it has missed."""
        if self._accepted:
            self._tasks.start(self._repeat(connection))

    async def _repeat(self, connection: Connection) -> None:
        try:
            await connection.reconfigure(self._accepted)
        except EngineUnavailable:  # it has ended, which the front handles
            pass
        except RequestRefused as error:
            logger.error("engine %s: %s", connection.engine_id, error)

    def close(self) -> None:
        self._tasks.cancel()


async def reset_prefix_caches(connections: Callable[[], Sequence[Connection]]) -> None:
    """Of all engines, also of those that join meanwhile: what they have is on disk. One that ends
    meanwhile has none. connections: the open ones."""
    asked: list[Connection] = []
    while new := [connection for connection in connections() if connection not in asked]:
        asked += new
        resets = [connection.reset_prefix_cache() for connection in new]
        found = await asyncio.gather(*resets, return_exceptions=True)
        here = connections()
        for connection, error in zip(new, found, strict=True):
            if isinstance(error, BaseException) and connection in here:
                raise error
    if not asked:
        raise EngineUnavailable("there is no engine", retry_after_s=RETRY_AFTER_S)


async def _all(answers: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Raises the first refusal, or EngineUnavailable if no engine answers."""
    found = await asyncio.gather(*answers, return_exceptions=True)
    errors = [error for error in found if isinstance(error, BaseException)]
    refused = [error for error in errors if isinstance(error, RequestRefused)]
    if refused or len(errors) == len(found):
        raise (refused or errors)[0]
