"""Health, and the list of models."""

from __future__ import annotations

from typing import Any

import anthropic

from tests.app.api.conftest import MODEL, Server
from tests.app.api.test_errors_http import check


async def test_health_follows_the_engine(server: Server) -> None:
    assert (await server.http.get("/health")).json() == {"status": "ready"}
    server.engine.ready = False
    answer = await server.http.get("/health")
    check(answer, 503)
    assert answer.headers["retry-after"] == "2"
    assert (await server.http.get("/live")).status_code == 200


async def test_the_version_is_that_of_the_document(server: Server) -> None:
    document = (await server.http.get("/openapi.json")).json()
    answer = await server.http.get("/version")
    assert answer.json() == {"version": document["info"]["version"]}


async def test_models(server: Server) -> None:
    models = await server.openai.models.list()
    assert [model.id for model in models.data] == [MODEL]
    model = await server.openai.models.retrieve(MODEL)
    assert model.created == 1_700_000_000


async def test_models_for_anthropics_client(server: Server) -> None:
    given: dict[str, Any] = {"base_url": server.url, "api_key": "none", "max_retries": 0}
    async with anthropic.AsyncAnthropic(**given) as client:
        page = await client.models.list()
    (model,) = page.data
    assert model.max_input_tokens == 4096
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert (model.created_at.timestamp(), page.has_next_page()) == (1_700_000_000, False)
