"""Streams that have nothing to send for a while: proxies and clients must not end them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from app.api import sse
from app.api.http.call import Call
from app.api.http.options import ApiOptions, KeyLimits
from app.api.sse import KeepAlive
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


async def _refusing_server(start_server: StartServer, **options: Any) -> Server:
    server = await start_server(ApiOptions(keep_alive_s=0.02, **options))
    server.engine.gate = asyncio.Event()
    server.engine.gates_first = True
    server.engine.fail_at = 0
    server.engine.failure = RequestRefused("Too late.", retry_after_s=1.0)
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
    server = await _refusing_server(start_server)
    lines = await _lines(server, "/v1/completions", {"prompt": "abc"}, COMMENT)
    events = [line for line in lines if line.startswith("data: {")]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "Too late."
    assert [line for line in lines if line][-1] == "data: [DONE]"


async def test_a_response_refused_after_it_has_begun(start_server: StartServer) -> None:
    """OpenAI's client takes no response that fails before it was created."""
    server = await _refusing_server(start_server)
    gate = server.engine.gate
    assert gate is not None
    async with server.openai.responses.stream(model=MODEL, input="abc") as stream:
        gate.set()  # the head is here, which only the comment can have brought
        kinds = [event.type async for event in stream]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.failed"]


async def test_a_refusal_after_it_costs_a_key_no_tokens(start_server: StartServer) -> None:
    server = await _refusing_server(start_server, api_keys={"k": KeyLimits(tokens_per_minute=10)})
    server.http.headers["authorization"] = "Bearer k"
    for _ in range(3):
        server.engine.gate = asyncio.Event()
        lines = await _lines(server, "/v1/completions", {"prompt": "abcdefg"}, COMMENT)
        assert any("Too late." in line for line in lines)


async def test_it_comes_after_a_period_without_anything() -> None:
    has_commented = asyncio.Event()
    sent: list[tuple[bytes, int]] = []
    num_periods = 0

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append((message["body"], num_periods))
            has_commented.set()

    async def receive() -> Any:
        raise AssertionError

    async def sleep(period_s: float) -> None:
        nonlocal num_periods
        num_periods += 1
        keep_alive.has_sent = num_periods < 4
        await asyncio.sleep(0)

    keep_alive = KeepAlive(Call({}, receive, send, ApiOptions()), b": c", sleep)
    await has_commented.wait()
    keep_alive.stop()
    assert sent[0] == (b": c", 4)


@pytest.mark.parametrize("body", [{}, {"logprobs": 1}], ids=["short way", "long way"])
async def test_a_stream_notes_what_it_sends(
    server: Server, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    num_sent = 0

    class Noting(KeepAlive):
        @property
        def has_sent(self) -> bool:
            return True

        @has_sent.setter
        def has_sent(self, value: bool) -> None:
            nonlocal num_sent
            num_sent += value

    monkeypatch.setattr(sse, "KeepAlive", Noting)
    await _lines(server, "/v1/completions", {"prompt": "abc", "max_tokens": 50, **body}, COMMENT)
    assert num_sent == 50
