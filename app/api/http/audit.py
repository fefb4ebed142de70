"""Logs refusals and changes with their callers, by the logger `legato.audit`.

Keys are named by a digest, never written. Refusals are counted, and logged once a second at
most, so that a flood of them fills no disk.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.types import Scope

from app.api.http.errors import ApiError

_log = logging.getLogger("legato.audit")
_LOGGED: Final = frozenset({401, 403})
_EVERY_S: Final = 1.0
_MAX_CHARS: Final = 1000


class Audit:
    """The audit log of one replica."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_s = -_EVERY_S
        self._num_unlogged = 0

    def refused(self, scope: Scope, status: int, message: str) -> None:
        """Note a refused request; logged if it lacks a key, a role, a known origin or host."""
        if status not in _LOGGED:
            return
        now_s = self._clock()
        if now_s - self._logged_s < _EVERY_S:
            self._num_unlogged += 1
            return
        more = f" (and {self._num_unlogged} others)" if self._num_unlogged else ""
        self._logged_s, self._num_unlogged = now_s, 0
        _log.warning(
            "refused %d %s %s from %s key %s: %s%s",
            status,
            scope["method"],
            _printable(scope["path"]),
            _client(scope),
            _key_name(scope),
            _printable(message),
            more,
        )


def note_change(scope: Scope, changes: Mapping[str, Any], problem: Exception | None) -> None:
    """Log a change of settings, or why it was refused; to those who may change nothing, as any
    other refusal of the guard's."""
    status = problem.status if isinstance(problem, ApiError) else 0
    audit: Audit | None = (scope.get("state") or {}).get("audit")
    if status in _LOGGED and audit is not None:
        audit.refused(scope, status, str(problem))
        return
    _log.warning(
        "settings %s by key %s from %s: %s",
        "changed" if problem is None else f"refused ({_printable(str(problem))})",
        _key_name(scope),
        _client(scope),
        _printable(json.dumps(changes, default=str)),
    )


def _client(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "?"


def _key_name(scope: Scope) -> str:
    return str((scope.get("state") or {}).get("key_name") or "none")


def _printable(text: str) -> str:
    """Removes control characters, so that a client's text cannot fake a line of the log."""
    return "".join(c if c.isprintable() else "?" for c in text[:_MAX_CHARS])
