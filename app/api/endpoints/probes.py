"""`/health`, `/live` and what is known of the model."""

from __future__ import annotations

from typing import Any

from app.api.context import Context
from app.api.http.call import Call
from app.api.http.errors import ApiError


class Probes:
    """Handlers that only read."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def health(self, call: Call) -> None:
        """200 once tokens can be generated, else 503."""
        if not self._context.engine.is_ready():
            raise ApiError(
                503,
                "The engine is not ready.",
                code="engine_unavailable",
                retry_after_s=self._context.options.unavailable_retry_s,
            )
        await call.reply_json({"status": "ready"})

    async def live(self, call: Call) -> None:
        """200 as long as this process answers at all."""
        await call.reply_json({"status": "live"})

    async def models(self, call: Call) -> None:
        """The list of models: this one."""
        await call.reply_json({"object": "list", "data": [self._model()]})

    async def model(self, call: Call) -> None:
        """One model by name."""
        name = str(call.scope["path_params"]["model"])
        if not name:
            raise ApiError(404, "No model is named behind /v1/models/.", param="model")
        self._context.check_model(name)
        await call.reply_json(self._model())

    def _model(self) -> dict[str, Any]:
        card = self._context.engine.card
        return {
            "id": card.name,
            "object": "model",
            "created": card.created_s,
            "owned_by": "legato",
            "max_model_len": card.max_model_len,
            "supports_embeddings": card.supports_embeddings,
        }
