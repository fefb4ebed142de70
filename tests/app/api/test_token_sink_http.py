"""A token's short way to the client: nothing overtaken, nothing lost, no failure swallowed."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import pytest

from app.api import sse
from app.api.events import ApiEvents, Deliveries, RequestInfo
from tests.app.api.conftest import MODEL, Server, StartServer
from tests.app.api.endpoints.test_completions import events_of, letters


def _text(events: list[Any], index: int = 0) -> str:
    choices = [event["choices"][0] for event in events]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


async def test_plain_tokens_take_it(server: Server) -> None:
    events = await events_of(server, prompt="abc", max_tokens=50)
    assert _text(events) == letters("abc", 50)
    assert server.engine.num_sunk == 48  # all but the first, which opens the answer, and the end


async def test_each_continuation_has_its_own_text(server: Server) -> None:
    events = await events_of(server, prompt="abc", max_tokens=20, n=3)
    assert server.engine.num_sunk == 3 * 18
    for index in range(3):
        assert _text(events, index) == letters("abc", 20, index)


@pytest.mark.parametrize(
    "body", [{"stop": ["zzzz"]}, {"logprobs": 1}, {"prompt": ["abc", "abc"]}], ids=str
)
async def test_what_is_more_than_plain_goes_the_long_way(
    server: Server, body: dict[str, Any]
) -> None:
    events = await events_of(server, **{"prompt": "abc", "max_tokens": 20, **body})
    assert server.engine.num_sunk == 0
    assert _text(events) == letters("abc", 20)


class Counting(ApiEvents):
    def on_request_start(self, request: RequestInfo, now_s: float, deliveries: Deliveries) -> None:
        self.deliveries = deliveries


async def test_usage_and_events_count_every_token(start_server: StartServer) -> None:
    events = Counting()
    server = await start_server(events=events)
    told = await events_of(
        server, prompt="abc", max_tokens=30, stream_options={"include_usage": True}
    )
    num_tokens = sum(number for _, number, _, _ in events.deliveries.tokens)
    assert told[-1]["usage"]["completion_tokens"] == num_tokens == 30


async def test_events_count_the_steps_of_tokens_that_come_together(
    start_server: StartServer,
) -> None:
    events = Counting()
    server = await start_server(events=events)
    server.engine.chunk_size = 4
    for body, num_steps in (({}, 1), ({"logprobs": 1}, 1), ({"logprobs": 1}, 4)):
        server.engine.chunk_steps = num_steps
        await events_of(server, prompt="abc", max_tokens=12, **body)
        assert [tuple(told[1:]) for told in events.deliveries.tokens] == [(4, 0, num_steps)] * 3


async def test_events_with_the_usage_so_far_take_it_too(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await events_of(server, prompt="abc", max_tokens=20, stream_options=options)
    assert server.engine.num_sunk == 18
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [*range(1, 21), 20]


async def test_a_failure_on_the_way_ends_the_stream_with_an_error(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    def escape(text: str) -> str:
        texts.append(text)
        if len(texts) == 5:
            raise RuntimeError("no more")
        return json.dumps(text)

    monkeypatch.setattr(sse, "json_string", escape)
    events = await events_of(server, prompt="abc", max_tokens=20)
    assert events[-1]["error"]["type"] == "server_error"
    assert _text(events[:-1]) == letters("abc", 4)


def _request(max_tokens: int) -> bytes:
    body = {"model": MODEL, "prompt": "abc", "stream": True, "max_tokens": max_tokens}
    content = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(content), content)
    )


async def _answer(reader: asyncio.StreamReader) -> str:
    """The text of one chunked answer."""
    await reader.readuntil(b"\r\n\r\n")
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    lines = re.findall(r"^data: (\{.*)$", body.decode(), re.MULTILINE)
    return _text([json.loads(line) for line in lines])


async def test_a_reader_that_rests_loses_nothing(start_server: StartServer) -> None:
    """What does not fit into the connection must wait, and nothing may pass it."""
    server = await start_server(max_model_len=20_000)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    connection.connect(("127.0.0.1", server.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 12)
    writer.write(_request(2_000))
    num_sunk = -1
    while not 0 < num_sunk == server.engine.num_sunk:  # until the connection is full
        num_sunk = server.engine.num_sunk
        for _ in range(200):
            await asyncio.sleep(0)
    assert await _answer(reader) == letters("abc", 2_000)
    assert 0 < server.engine.num_sunk < 1_998
    writer.close()


async def test_requests_in_one_packet_are_answered_in_order(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(_request(40) + _request(7) + _request(20))
    assert [await _answer(reader) for _ in range(3)] == [letters("abc", n) for n in (40, 7, 20)]
    assert server.engine.num_sunk == 38 + 5 + 18
    writer.close()


async def test_an_upgrade_is_declined_and_the_connection_goes_on(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    asked = (
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    )
    writer.write(asked)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
