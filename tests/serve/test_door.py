"""A lone replica's own door: limits, hand-over to a successor, replacement, drain."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.types import Receive, Scope, Send

from app.api.http import server as door_module
from app.api.http.server import MAX_HEAD_BYTES, Door
from tests.serve.conftest import free_port

HOST = "127.0.0.1"


class Slow:
    """An application that answers its second half when it is told to."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.name, "more_body": True})
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"!", "more_body": False})


async def test_a_successor_opens_the_port_while_the_old_door_finishes_its_answers() -> None:
    port = free_port()
    old, new = Slow(b"old"), Slow(b"new")
    old_door, new_door = Door(old, HOST, port), Door(new, HOST, port)
    await old_door.open()
    url = f"http://{HOST}:{port}/"
    async with httpx.AsyncClient() as client, client.stream("GET", url) as answer:
        parts = answer.aiter_raw()
        assert await anext(parts) == b"old"
        closing = asyncio.create_task(old_door.close())
        await new_door.open()
        new.go_on.set()
        while (await client.get(url)).content != b"new!":  # until the old one's socket is gone
            pass
        assert not closing.done()
        old.go_on.set()
        assert b"".join([part async for part in parts]) == b"!"
        await closing
        assert answer.headers["date"]
    await new_door.close()


async def test_heads_without_end_and_without_haste_are_cut(monkeypatch: Any) -> None:
    monkeypatch.setattr(door_module, "HEAD_LIMIT_S", 0.2)
    port = free_port()
    door = Door(Slow(b""), HOST, port)
    await door.open()

    async def answer_to(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(data)
        with suppress(ConnectionError):
            return await reader.read()  # the server's end of the connection, or this hangs
        return b""

    try:
        async with asyncio.timeout(30):
            assert await answer_to(b"") == b""
            assert await answer_to(b"GET / HTTP/1.1\r\nHost: x") == b""
            endless = b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * (MAX_HEAD_BYTES // 6 + 9)
            assert b"400 Bad Request" in await answer_to(endless)
    finally:
        await door.close()


def replicas_of(server: Any) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if "ray::ServeReplica" in " ".join(process.cmdline()):
                found.append(process)
    return found


def complete(server: Any) -> httpx.Response:
    body = {"model": server.model, "prompt": [7] * 5, "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


@pytest.mark.serve
@pytest.mark.timeout(240)
def test_a_killed_replica_comes_back_on_its_port_and_ctrl_c_drains(
    serve: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    args = {"model": {"path": str(tiny_model("llama"))}, "kv": {"memory_gib": 0.01}}
    with serve(args) as server:
        before = complete(server).json()["choices"]
        (replica,) = replicas_of(server)
        replica.kill()
        replica.wait(30)
        with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:  # 64 s in all
            assert client.get(f"{server.url}/health").status_code == 200
        assert complete(server).json()["choices"] == before
        (successor,) = replicas_of(server)
        assert successor.pid != replica.pid

        body = {"model": server.model, "prompt": [7] * 5, "max_tokens": 200}
        body |= {"ignore_eos": True, "stream": True}
        with (
            httpx.stream("GET", f"{server.url}/console/feed") as watching,
            httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            assert [line for line in lines if line][-1] == "data: [DONE]"
            assert "data: " in watching.read().decode()  # to its end: an open console is let go
        assert server.process.wait(60) == 0


@pytest.mark.serve
@pytest.mark.timeout(240)
def test_two_replicas_answer_behind_one_address(
    serve: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    args = {"model": {"path": str(tiny_model("llama"))}, "kv": {"memory_gib": 0.01}}
    with serve(args, num_replicas=2) as server:
        assert len(replicas_of(server)) == 2
        answers = [complete(server).json()["choices"] for _ in range(8)]
        assert answers == answers[:1] * 8
