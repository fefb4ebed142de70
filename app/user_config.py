"""A deployment's `user_config`: live settings, which Serve hands to each of its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from actors.scheduling.config import LIVE_KEYS, SETTINGS, SchedulerConfig
from actors.scheduling.live_changes import cleared_by, plain
from actors.transport.notices import notify
from app.engine_client.client import (
    EngineClient,
    EngineError,
    EngineUnavailable,
    RequestRefused,
)

_MAX_WAITS = 60  # for a rebuild, each as long as a request waits; none for a failed engine


class UserConfig:
    """Applies what Serve hands over to one engine. configured: the settings that it began with,
    to which a key returns that is no longer given."""

    def __init__(self, engine: EngineClient, configured: SchedulerConfig) -> None:
        self._engine = engine
        self._configured = configured
        self._applied: frozenset[str] = frozenset()
        self._last: dict[str, Any] | None = None  # applied or refused; None during the start
        self._turn = asyncio.Lock()  # Serve does not wait for one before it hands over the next
        self._waits = asyncio.Event()  # set while one waits for an engine
        self._tasks: set[asyncio.Task[None]] = set()  # that nobody awaits

    async def apply(self, user_config: Mapping[str, Any] | None) -> None:
        """Called first as the replica starts: it then raises EngineError naming a bad key. Later
        that is only told of: Serve kills a running replica that refuses, with its streams.

        Returns while an engine is being rebuilt: what was given is applied after that, and Serve,
        which takes the deployment to be changing until then, goes on. The same again changes
        nothing, since a visitor of the console may have changed it."""
        given = {plain(key): value for key, value in (user_config or {}).items()}
        if self._last is None:
            await self._in_turn(given)
            return
        applying = asyncio.create_task(self._in_turn(given))
        waiting = asyncio.create_task(self._waits.wait())
        await asyncio.wait([applying, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if applying.done():
            applying.result()
        else:
            self._tasks.add(applying)
            applying.add_done_callback(self._ended)

    def _ended(self, applying: asyncio.Task[None]) -> None:
        self._tasks.discard(applying)
        if not applying.cancelled() and (error := applying.exception()) is not None:
            notify(f"user_config is not applied: {type(error).__name__}: {error}")

    async def _in_turn(self, given: dict[str, Any]) -> None:
        async with self._turn:
            if given != self._last:
                await self._apply(given, is_serving=self._last is not None)

    async def _apply(self, given: dict[str, Any], is_serving: bool) -> None:
        left_out = self._applied - given.keys()
        back = left_out | cleared_by(left_out, "auto").keys()
        changes = {key: self._configured_value(key) for key in sorted(back)} | given
        try:
            if changes:
                await self._reconfigure(changes)
        except EngineError as error:
            if not is_serving:
                raise
            notify(f"user_config is not applied, the settings stay as they were: {error}")
            if not isinstance(error, RequestRefused):
                return  # the same again may be accepted
        else:
            self._applied = frozenset(given)
        self._last = given

    async def _reconfigure(self, changes: Mapping[str, Any]) -> None:
        """Wait for an engine that is being rebuilt: Serve hands the same over once."""
        if not self._engine.is_ready():
            self._waits.set()
        try:
            for _ in range(_MAX_WAITS - 1):
                with suppress(EngineUnavailable):
                    await self._engine.reconfigure(changes)
                    return
                self._waits.set()
            await self._engine.reconfigure(changes)
        finally:
            self._waits.clear()

    def _configured_value(self, key: str) -> Any:
        """As the YAML writes it."""
        name = LIVE_KEYS[key]
        return SETTINGS[name].in_yaml(getattr(self._configured, name))
