"""Clients that leave cost nothing more; every request is reported once."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from app.api.events import ApiEvents, Deliveries, RequestInfo, RequestOutcome
from tests.app.api.conftest import MODEL, Server, StartServer

pytestmark = pytest.mark.heavy

PROTOCOLS = ["uvicorn", "own"]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorder(ApiEvents):
    """Keeps what the API reports."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.finished = asyncio.Event()

    def on_request_start(self, request: RequestInfo, now_s: float, deliveries: Deliveries) -> None:
        self.deliveries = deliveries
        self.started_s = now_s
        self.log.append(("start", request))

    def on_finish(self, request: RequestInfo, outcome: RequestOutcome, now_s: float) -> None:
        self.log += [("tokens", num_tokens) for _, num_tokens, _, _ in self.deliveries.tokens]
        self.log.append(("finish", outcome))
        self.finished.set()


async def post(server: Server, body: dict[str, Any]) -> tuple[Any, asyncio.StreamWriter]:
    """Send a completion request over a bare connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    content = json.dumps({"model": MODEL, **body}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"x-request-disconnect-disabled: 1\r\n"
        b"content-length: " + str(len(content)).encode() + b"\r\n\r\n" + content
    )
    await writer.drain()
    return reader, writer


async def test_events_of_a_whole_request(start_server: StartServer) -> None:
    recorder = Recorder()
    server = await start_server(events=recorder)
    begin_s = time.monotonic()
    server.engine.chunk_size = 2
    server.engine.num_cached_tokens = 1
    await server.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "abc", "max_tokens": 3, "user": "ann"},
        headers={"x-request-id": "r1", "traceparent": TRACEPARENT},
    )
    info = RequestInfo("r1", "/v1/completions", "ann", False, 3, 1, TRACEPARENT)
    assert recorder.log == [
        ("start", info),
        ("tokens", 2),
        ("tokens", 1),
        ("finish", RequestOutcome(200, "length", 3, 1)),
    ]
    assert begin_s <= recorder.started_s <= time.monotonic()
    assert server.engine.seen[0].arrived_s == recorder.started_s  # objectives count from here


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_request(
    start_server: StartServer, stream: bool
) -> None:
    recorder = Recorder()
    server = await start_server(events=recorder)
    server.engine.gate = asyncio.Event()
    reader, writer = await post(server, {"prompt": "abc", "max_tokens": 9, "stream": stream})
    if stream:
        await reader.readuntil(b"\r\n\r\n")
    else:
        while not server.engine.num_running:  # noqa: ASYNC110 (the engine does not tell)
            await asyncio.sleep(0.001)
    writer.close()
    await recorder.finished.wait()
    await server.engine.all_idle.wait()
    assert len(server.engine.closed) == 1
    assert recorder.log[-1][1].reason == "disconnect"
    after = await server.http.get("/health")
    assert after.status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_between_the_ends_of_two_continuations(
    start_server: StartServer, stream: bool
) -> None:
    """One has ended, so that it has a finish reason; the request has not."""
    recorder = Recorder()
    server = await start_server(events=recorder)
    server.engine.gate = asyncio.Event()
    server.engine.script = lambda request, index: [97] if index == 0 else [97] * 9
    body = {"prompt": "abc", "max_tokens": 9, "n": 2, "stream": stream}
    _, writer = await post(server, body)
    await server.engine.at_gate.wait()
    writer.close()
    await recorder.finished.wait()
    assert recorder.log[-1][1] == RequestOutcome(200, "disconnect", 2, 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_of_any_type_is_reported_as_one(
    start_server: StartServer, stream: bool
) -> None:
    recorder = Recorder()
    server = await start_server(events=recorder)
    server.engine.fail_at, server.engine.failure = 2, RuntimeError("not an engine's")
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 9, "stream": stream}
    answer = await server.http.post("/v1/completions", json=body)
    assert b"server_error" in answer.content
    assert recorder.log[-1][1] == RequestOutcome(500, "server_error", 2, 0)


async def test_a_hundred_leave_at_random_tokens(start_server: StartServer) -> None:
    server = await start_server()

    async def leave(number: int) -> None:
        reader, writer = await post(
            server, {"prompt": "abc", "max_tokens": 2000, "stream": True, "n": 1 + number % 3}
        )
        for _ in range(1 + number % 17):
            await reader.readuntil(b"\n\n")
        writer.close()

    await asyncio.gather(*(leave(number) for number in range(100)))
    await server.engine.all_idle.wait()
    assert server.engine.num_running == 0
    answer = await server.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1}
    )
    assert answer.status_code == 200


async def test_a_batch_ends_all_its_prompts(start_server: StartServer) -> None:
    server = await start_server()
    server.engine.gate = asyncio.Event()
    reader, writer = await post(
        server, {"prompt": ["ab", "cd", "ef"], "max_tokens": 9, "stream": True}
    )
    await reader.readuntil(b"\n\n")
    writer.close()
    await server.engine.all_idle.wait()
    assert len(server.engine.closed) == 3
