"""`POST /reset_prefix_cache`, as in vLLM."""

from __future__ import annotations

from typing import Final

from app.api.context import Context
from app.api.endpoints.pages import parameters
from app.api.http.audit import note_change
from app.api.http.call import Call
from app.api.http.errors import ApiError, invalid

# What vLLM's parameters would have to say: running requests go on, stores beside the device's are
# emptied too.
_DONE_ANYWAY: Final = {"reset_running_requests": "false", "reset_external": "true"}


class PrefixCacheReset:
    """For keys that may change settings; every attempt of theirs is a line of the audit."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, call: Call) -> None:
        """Of the model that `?model=NAME` says, or of all here, also where one fails."""
        try:
            call.check_admin()
            asked = parameters(call, ("model", *_DONE_ANYWAY))
            for param, wanted in _DONE_ANYWAY.items():
                if asked.get(param, wanted).lower() != wanted:
                    raise invalid(f"{param}: {asked[param]!r} is not supported", param)
            name = asked.get("model")
            every = self._context.every
            meant = every if name is None else {name: self._context.of(name)}
        except ApiError as error:
            note_change(call.scope, {}, error)
            raise
        failures: list[Exception] = []
        for name, one in meant.items():
            failure = None
            try:
                await one.engine.reset_prefix_cache()
            except Exception as error:
                failures.append(failure := error)
            # Before the caller knows, and may be gone.
            note_change(call.scope, {"reset_prefix_cache": name}, failure)
        if failures:
            raise failures[0]
        await call.reply_json({"models": list(meant)})
