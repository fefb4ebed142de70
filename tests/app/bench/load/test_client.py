"""The client of a load: arrivals never wait, and its server has one root."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from app.bench.load.client import (
    Job,
    LoadClient,
    Trace,
    first_model,
    open_loop,
    server_root,
    sse_events,
)
from tests.app.bench.load.traces import trace


async def test_an_arrival_does_not_wait_for_the_answer_before_it() -> None:
    answered = asyncio.Event()

    async def send(number: int, begin_s: float) -> Trace:
        if number == 0:
            await answered.wait()  # the second request's answer lets the first one end
        else:
            answered.set()
        return trace(0.0, 0.1 + number)

    traces = await asyncio.wait_for(open_loop([Job(0.0, 1, 1)] * 2, send), timeout=30)
    assert [t.event_times_s for t in traces] == [[0.1], [1.1]]


async def test_arrivals_end_at_once_where_they_are_told_to() -> None:
    enough = asyncio.Event()

    async def send(number: int, begin_s: float) -> Trace:
        enough.set()  # with the second request hours away
        return trace(0.0, 0.1)

    jobs = [Job(0.0, 1, 1), Job(36_000.0, 1, 1)]
    assert len(await asyncio.wait_for(open_loop(jobs, send, enough), timeout=30)) == 1


@pytest.mark.parametrize(
    "url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1//"]
)
def test_a_servers_root_is_found_in_its_base_url(url: str) -> None:
    assert server_root(url) == "http://h:1"


async def test_every_request_has_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, str]] = []

    def get(url: str, *, headers: dict[str, str], **_: Any) -> httpx.Response:
        sent.append(headers)
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    class Session:
        def post(self, url: str, *, headers: dict[str, str], **_: Any) -> Any:
            sent.append(headers)
            raise TimeoutError

    monkeypatch.setattr(httpx, "get", get)
    client = LoadClient("http://h:1", first_model("http://h:1", "k"), api_key="k")
    await client.send(Session(), Job(0.0, 1, 1), 0.0)  # type: ignore[arg-type]
    assert [headers["authorization"] for headers in sent] == ["Bearer k"] * 2


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("num_bytes", [1, 7, 1000])
async def test_events_end_with_a_blank_line_of_either_kind(end: bytes, num_bytes: int) -> None:
    sent = b"".join(b"data: " + event + 2 * end for event in (b'{"a":1}', b'{"b":2}', b"[DONE]"))
    parts = [sent[at : at + num_bytes] for at in range(0, len(sent), num_bytes)]

    async def iter_any() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    response = cast(Any, SimpleNamespace(content=SimpleNamespace(iter_any=iter_any)))
    found = [event async for _, events in sse_events(response) for event in events]
    assert found == [b'data: {"a":1}', b'data: {"b":2}', b"data: [DONE]"]


class _Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"data": [{"id": "m"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "http://127.0.0.1:1"])
def test_no_proxy_is_asked_as_none_is_for_the_load(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert first_model(f"http://127.0.0.1:{server.server_port}") == "m"
        server.shutdown()
