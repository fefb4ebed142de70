"""`/v1/embeddings`, against numbers computed by hand."""

from __future__ import annotations

import math

import pytest

from tests.app.api.conftest import MODEL, Server, StartServer


async def test_embeddings_are_normalized_and_in_order(server: Server) -> None:
    answer = await server.openai.embeddings.create(model=MODEL, input=["ab", "c"])
    assert answer.usage.prompt_tokens == 3
    for item, total in zip(answer.data, (97 + 98, 99), strict=True):
        raw = [float(total), 1.0, 2.0, 4.0]  # what HandEngine pools
        length = math.sqrt(sum(value * value for value in raw))
        assert item.embedding == pytest.approx([value / length for value in raw])
    assert {request.pooling for request in server.engine.seen} == {"mean"}


async def test_embeddings_as_they_are(server: Server) -> None:
    answer = await server.http.post(
        "/v1/embeddings",
        json={"model": MODEL, "input": [[97, 98]], "pooling": "last", "normalize": False},
    )
    assert answer.json()["data"][0]["embedding"] == [195.0, 1.0, 2.0, 4.0]
    assert server.engine.seen[-1].pooling == "last"


async def test_models_without_embeddings_say_so(start_server: StartServer) -> None:
    server = await start_server(supports_embeddings=False)
    answer = await server.http.post("/v1/embeddings", json={"model": MODEL, "input": "a"})
    assert answer.status_code == 400
