"""A deployment's `user_config`: live settings, which Serve hands to each of its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.scheduling.config import LIVE_KEYS, SETTINGS, SchedulerConfig
from actors.scheduling.live_changes import cleared_by, plain
from actors.transport.notices import notify
from app.engine_client.client import EngineClient, EngineError


class UserConfig:
    """Applies what Serve hands over to one engine. configured: the settings that it began with,
    to which a key returns that is no longer given."""

    def __init__(self, engine: EngineClient, configured: SchedulerConfig) -> None:
        self._engine = engine
        self._configured = configured
        self._applied: frozenset[str] = frozenset()
        self._last: dict[str, Any] | None = None  # given; None before the replica's start ends

    async def apply(self, user_config: Mapping[str, Any] | None) -> None:
        """Called first as the replica starts: it then raises EngineError naming a bad key. Later
        that is only told of: Serve kills a running replica that refuses, with its streams.

        The same again changes nothing, since a visitor of the console may have changed it."""
        given = {plain(key): value for key, value in (user_config or {}).items()}
        is_serving = self._last is not None
        if given == self._last:
            return
        self._last = given
        left_out = self._applied - given.keys()
        back = left_out | cleared_by(left_out, "auto").keys()
        changes = {key: self._configured_value(key) for key in sorted(back)} | given
        if not changes:
            return
        try:
            await self._engine.reconfigure(changes)
        except EngineError as refused:
            if not is_serving:
                raise
            notify(f"user_config is not applied, the settings stay as they were: {refused}")
        else:
            self._applied = frozenset(given)

    def _configured_value(self, key: str) -> Any:
        """As the YAML writes it."""
        name = LIVE_KEYS[key]
        return SETTINGS[name].in_yaml(getattr(self._configured, name))
