"""Streams that have nothing to send for a while: proxies and clients must not end them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from app.api.http.options import ApiOptions
from app.engine_client.client import RequestRefused
from tests.app.api.conftest import MODEL, Server, StartServer
from tests.app.api.endpoints.test_completions import letters

PROTOCOLS = ["uvicorn", "own"]
COMMENT = ": keep-alive"
PING = ["event: ping", 'data: {"type":"ping"}']


async def _waiting_server(start_server: StartServer, *, first: bool, period_s: float) -> Server:
    server = await start_server(ApiOptions(keep_alive_s=period_s))
    server.engine.gate = asyncio.Event()
    server.engine.gates_first = first
    return server


async def _lines(server: Server, path: str, body: dict[str, Any], mark: str) -> list[str]:
    """The lines of a stream, whose engine goes on at a line that is `mark`: at the first, or at the
    first after a token where only later ones wait."""
    lines: list[str] = []
    async with server.http.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as r:
        assert r.status_code == 200
        async for line in r.aiter_lines():
            lines.append(line)
            has_begun = server.engine.gates_first or any("data: {" in one for one in lines)
            if line == mark and has_begun and server.engine.gate is not None:
                server.engine.gate.set()
    return lines


@pytest.mark.parametrize("first", [True, False], ids=["before the first token", "after it"])
async def test_a_comment_is_sent_where_tokens_take_long(
    start_server: StartServer, first: bool
) -> None:
    server = await _waiting_server(start_server, first=first, period_s=0.02)
    lines = await _lines(server, "/v1/completions", {"prompt": "abc", "max_tokens": 5}, COMMENT)
    events = [line for line in lines if line.startswith("data: {")]
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in events]
    assert COMMENT in (lines[:1] if first else lines[2:])
    assert "".join(texts) == letters("abc", 5)
    assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
    ("/v1/responses", {"input": "abc"}),
])  # fmt: skip
async def test_chats_are_kept_alive_too(
    start_server: StartServer, path: str, body: dict[str, Any]
) -> None:
    server = await _waiting_server(start_server, first=True, period_s=0.02)
    lines = await _lines(server, path, body, COMMENT)
    assert lines[0] == COMMENT
    assert any(line.startswith("data: {") for line in lines)


async def test_anthropics_streams_have_pings(start_server: StartServer) -> None:
    server = await _waiting_server(start_server, first=True, period_s=0.02)
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "abc"}]}
    lines = await _lines(server, "/v1/messages", body, PING[1])
    assert lines[:2] == PING
    assert "event: message_stop" in lines


async def test_openais_client_passes_over_comments(start_server: StartServer) -> None:
    server = await _waiting_server(start_server, first=True, period_s=0.02)
    gate = server.engine.gate
    assert gate is not None
    asking = server.openai.completions.create(model=MODEL, prompt="abc", max_tokens=5, stream=True)
    stream = await asking  # returns with the head, which only the comment can have brought
    gate.set()
    choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.text for choice in choices) == letters("abc", 5)
    assert choices[-1].finish_reason == "length"


async def test_a_refusal_after_it_is_an_event(start_server: StartServer) -> None:
    server = await _waiting_server(start_server, first=True, period_s=0.02)
    server.engine.fail_at = 0
    server.engine.failure = RequestRefused("Too late.", retry_after_s=1.0)
    lines = await _lines(server, "/v1/completions", {"prompt": "abc"}, COMMENT)
    events = [line for line in lines if line.startswith("data: {")]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "Too late."
    assert [line for line in lines if line][-1] == "data: [DONE]"


async def test_a_stream_that_sends_gets_none(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(keep_alive_s=3600))
    lines = await _lines(server, "/v1/completions", {"prompt": "abc", "max_tokens": 50}, COMMENT)
    assert COMMENT not in lines
