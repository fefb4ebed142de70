"""`/health`, `/live`, `/version` and the list of models."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from app.api.context import Context
from app.api.http.call import Call
from app.api.http.errors import ApiError
from app.engine_client.client import EngineUnavailable, ModelCard
from app.paths import version


class Probes:
    """Handlers that only read."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def health(self, call: Call) -> None:
        """200 once tokens of any model can be generated, else 503."""
        ready = {name: one.engine.is_ready() for name, one in self._context.models.items()}
        if not (any(ready.values()) if ready else self._context.engine.is_ready()):
            raise ApiError(
                503,
                "The engine is not ready.",
                code="engine_unavailable",
                retry_after_s=self._context.options.unavailable_retry_s,
            )
        await call.reply_json({"status": "ready"} | ({"models": ready} if ready else {}))

    async def live(self, call: Call) -> None:
        """200 as long as this process answers."""
        await call.reply_json({"status": "live"})

    async def version(self, call: Call) -> None:
        """Legato's, in vLLM's form."""
        await call.reply_json({"version": version()})

    async def models(self, call: Call) -> None:
        """The list of models, each before its adapters; of several, only those of which an engine
        has published a card."""
        found = list[dict[str, Any]]()
        for one in self._context.every.values():
            adapters = {} if one.adapters is None else one.adapters.adapters
            with suppress(EngineUnavailable):
                found += [shown(engine.card) for engine in (one.engine, *adapters.values())]
        # What Anthropic's clients page by.
        ends = {"has_more": False, "first_id": None, "last_id": None}
        if found:
            ends |= {"first_id": found[0]["id"], "last_id": found[-1]["id"]}
        await call.reply_json({"object": "list", "data": found, **ends})

    async def model(self, call: Call) -> None:
        """One model by name."""
        name = str(call.scope["path_params"]["model"])
        if not name:
            raise ApiError(404, "No model is named behind /v1/models/.", param="model")
        await call.reply_json(shown(self._context.of(name).engine.card))


def shown(card: ModelCard) -> dict[str, Any]:
    """The model object, of OpenAI's and of Anthropic's API at once."""
    parent = {} if card.parent is None else {"parent": card.parent}
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "legato",
        "type": "model",
        "display_name": card.name,
        "created_at": datetime.fromtimestamp(card.created_s, UTC).isoformat(),
        "max_model_len": card.max_model_len,
        "max_input_tokens": card.max_model_len,
        "supports_embeddings": card.supports_embeddings,
        **parent,
    }
