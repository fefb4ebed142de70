"""`POST /reset_prefix_cache`, as in vLLM."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import QueryParams

from app.api.context import Context
from app.api.http.audit import note_change
from app.api.http.call import Call
from app.api.http.errors import ApiError
from app.engine_client.client import EngineError

# What vLLM's parameters would have to say: running requests go on, stores beside the device's are
# emptied too.
_DONE_ANYWAY = {"reset_running_requests": "false", "reset_external": "true"}


class PrefixCacheReset:
    """For keys that may change settings; every attempt of theirs is a line of the audit."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, call: Call) -> None:
        """Of the model that `?model=NAME` says, or of all here."""
        changes: dict[str, Any] = {}
        try:
            call.check_admin()
            asked = QueryParams(call.scope["query_string"])
            for param, value in asked.items():
                if param != "model" and value.lower() != _DONE_ANYWAY.get(param):
                    raise ApiError(400, f"{param}: {value!r} is not supported", param=param)
            name = asked.get("model")
            every = self._context.every
            meant = every if name is None else {name: self._context.of(name)}
            changes["reset_prefix_cache"] = list(meant)
            for one in meant.values():
                await one.engine.reset_prefix_cache()
        except (ApiError, EngineError) as error:
            note_change(call.scope, changes, error)
            raise
        note_change(call.scope, changes, None)  # before the caller knows, and may be gone
        await call.reply_json({"models": list(meant)})
