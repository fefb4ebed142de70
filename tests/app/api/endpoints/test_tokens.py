"""`/tokenize` and `/detokenize` undo each other."""

from __future__ import annotations

from tests.app.api.conftest import Server


async def test_tokenize_and_back(server: Server) -> None:
    found = await server.http.post("/tokenize", json={"prompt": "the é", "return_token_strs": True})
    tokens = found.json()["tokens"]
    assert found.json()["count"] == len(tokens)
    assert found.json()["token_strs"] == ["the", " ", "é"]
    back = await server.http.post("/detokenize", json={"tokens": tokens})
    assert back.json() == {"prompt": "the é"}


async def test_tokenize_a_conversation(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}
    tokens = (await server.http.post("/tokenize", json=body)).json()["tokens"]
    back = await server.http.post("/detokenize", json={"tokens": tokens})
    assert back.json() == {"prompt": "<|user|>Hi<|end|>"}
