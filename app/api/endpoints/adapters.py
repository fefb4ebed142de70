"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from app.api.context import Context
from app.api.endpoints.probes import shown
from app.api.http.audit import note_change
from app.api.http.call import Call
from app.api.http.errors import ApiError, invalid
from app.api.schema.other import LoadAdapterRequest, UnloadAdapterRequest
from app.engine_client.client import AdapterControl, EngineError


class AdapterChanges:
    """Handlers of both, for keys that may change settings; every attempt is a line of the audit."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _control(self, call: Call) -> AdapterControl:
        call.check_admin()
        if self._context.adapters is None:
            raise invalid("This server has no adapter slots (setting `adapters`).", "lora_name")
        return self._context.adapters

    async def load(self, call: Call) -> None:
        """Answers once the adapter is ready."""
        changes: dict[str, Any] = {}
        await self._noted(call, changes, self._load(call, changes))

    async def _load(self, call: Call, changes: dict[str, Any]) -> Mapping[str, Any]:
        control = self._control(call)
        body = await call.read_json(LoadAdapterRequest)
        changes |= {"load_lora_adapter": body.lora_name, "lora_path": body.lora_path}
        await control.load_adapter(body.lora_name, body.lora_path)
        return shown(control.adapters[body.lora_name].card)

    async def unload(self, call: Call) -> None:
        """Removes the name at once; requests that run on the adapter go on to their end."""
        changes: dict[str, Any] = {}
        await self._noted(call, changes, self._unload(call, changes))

    async def _unload(self, call: Call, changes: dict[str, Any]) -> Mapping[str, Any]:
        control = self._control(call)
        body = await call.read_json(UnloadAdapterRequest)
        changes |= {"unload_lora_adapter": body.lora_name}
        if body.lora_name not in control.adapters:
            raise ApiError(
                404, f"No adapter '{body.lora_name}' is loaded.", "lora_name", "model_not_found"
            )
        num_running = await control.unload_adapter(body.lora_name)
        return {"id": body.lora_name, "num_running": num_running}

    async def _noted(
        self, call: Call, changes: dict[str, Any], work: Awaitable[Mapping[str, Any]]
    ) -> None:
        try:
            answer = await work
        except (ApiError, EngineError) as error:
            note_change(call.scope, changes, str(error))
            raise
        note_change(call.scope, changes, None)  # before the caller knows, and may be gone
        await call.reply_json(answer)
