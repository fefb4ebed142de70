"""`/tokenize` and `/detokenize` undo each other; what is told of the tokenizer."""

from __future__ import annotations

from typing import Any

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


async def test_a_client_can_write_chats_as_the_server_does(server: Server) -> None:
    told = (await server.http.get("/tokenizer_info")).json()
    assert "{% if add_generation_prompt %}<|assistant|>{% endif %}" in told["chat_template"]
    assert told["model_max_length"] == (await tokenized(server, "x"))["max_model_len"]
    assert await tokenized(server, told["eos_token"]) == await tokenized(server, "<|end|>")
    assert (await server.http.get("/tokenizer_info?model=none")).status_code == 404


async def tokenized(server: Server, text: str) -> dict[str, Any]:
    return dict((await server.http.post("/tokenize", json={"prompt": text})).json())
