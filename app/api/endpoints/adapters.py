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
from app.engine_client.client import AdapterControl


class AdapterChanges:
    """Handlers of both, for keys that may change settings; every attempt of theirs is a line of the
    audit."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _controls(self, call: Call) -> Mapping[str, AdapterControl]:
        """Of every model with slots, by its name."""
        call.check_admin()
        every = self._context.every.items()
        found = {name: one.adapters for name, one in every if one.adapters is not None}
        if not found:
            raise invalid("This server has no adapter slots (setting `adapters`).", "lora_name")
        return found

    async def load(self, call: Call) -> None:
        """Answers once the adapter is ready."""
        changes: dict[str, Any] = {}
        await self._noted(call, changes, self._load(call, changes))

    async def _load(self, call: Call, changes: dict[str, Any]) -> Mapping[str, Any]:
        controls = self._controls(call)
        body = await call.read_json(LoadAdapterRequest)
        changes |= {"load_lora_adapter": body.lora_name, "lora_path": body.lora_path}
        base = body.base_model_name
        if base is None and len(controls) == 1:
            (base,) = controls
        if base is None or base not in controls:
            wrong = "The adapter needs a model that has slots for it"
            if base is not None:
                wrong = f"No model '{base[:128]}' here has slots for adapters, but these have"
            raise invalid(f"{wrong}: {', '.join(controls)}.", "base_model_name")
        changes["base_model_name"] = base
        control = controls[base]
        await control.load_adapter(body.lora_name, body.lora_path)
        return shown(control.adapters[body.lora_name].card)

    async def unload(self, call: Call) -> None:
        """Removes the name at once; requests that run on the adapter go on to their end."""
        changes: dict[str, Any] = {}
        await self._noted(call, changes, self._unload(call, changes))

    async def _unload(self, call: Call, changes: dict[str, Any]) -> Mapping[str, Any]:
        controls = self._controls(call)
        body = await call.read_json(UnloadAdapterRequest)
        changes |= {"unload_lora_adapter": body.lora_name}
        for control in controls.values():
            if body.lora_name in control.adapters:
                num_running = await control.unload_adapter(body.lora_name)
                return {"id": body.lora_name, "num_running": num_running}
        raise ApiError(
            404, f"No adapter '{body.lora_name}' is loaded.", "lora_name", "model_not_found"
        )

    async def _noted(
        self, call: Call, changes: dict[str, Any], work: Awaitable[Mapping[str, Any]]
    ) -> None:
        try:
            answer = await work
        except Exception as error:
            note_change(call.scope, changes, error)
            raise
        note_change(call.scope, changes, None)  # before the caller knows, and may be gone
        await call.reply_json(answer)
