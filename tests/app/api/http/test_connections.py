"""Clients that stop reading are dropped; those that read slowly are not."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from app.api.http.options import ApiOptions
from tests.app.api.conftest import MODEL, StartServer
from tests.app.api.test_disconnects_http import Recorder

pytestmark = pytest.mark.heavy

PROTOCOLS = ["uvicorn", "own"]
TCP_ESTABLISHED = 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_stops_reading_is_dropped(
    start_server: StartServer, stream: bool
) -> None:
    """In the middle of a stream, and with a whole answer that it has not taken."""
    recorder = Recorder()
    server = await start_server(
        ApiOptions(send_timeout_s=0.05), events=recorder, max_model_len=10**7
    )
    server.engine.chunk_size = 5000
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.connect(("127.0.0.1", server.port))
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 9_000_000, "stream": stream}
    content = json.dumps(body).encode()
    stuck.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: " + str(len(content)).encode() + b"\r\n\r\n" + content
    )
    await recorder.finished.wait()  # although the socket stays open
    await server.engine.all_idle.wait()
    if stream:
        assert recorder.log[-1][1].reason == "disconnect"
        assert recorder.log[-1][1].num_completion_tokens < 9_000_000
    while stuck.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_ESTABLISHED:  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # nothing tells but the state of the connection
    stuck.close()


async def test_a_client_that_reads_slowly_is_kept(start_server: StartServer) -> None:
    """It takes less in the time-out than its buffers hold, but it takes something."""
    server = await start_server(ApiOptions(send_timeout_s=2.0), max_model_len=10**7)
    server.engine.chunk_size = 5000
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", server.port))
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 400_000, "stream": True}
    content = json.dumps(body).encode()
    slow.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: " + str(len(content)).encode() + b"\r\n\r\n" + content
    )
    last, until_s = b"", time.monotonic() + 3.5
    while b"[DONE]" not in last:
        part = await asyncio.to_thread(slow.recv, 2000)
        assert part, "dropped"
        last = last[-20:] + part
        if time.monotonic() < until_s:
            await asyncio.sleep(0.05)  # a slow reader, not a wait for anything
    slow.close()
