"""A lone replica's own HTTP server: limits, and hand-over to a successor."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from app.api.http import connections, http_server
from app.api.http.connections import MAX_HEAD_BYTES, RequestProtocol
from app.api.http.http_server import HttpServer
from tests.ports import free_port

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


class Late:
    """An application that begins its answer when it is told to, unless its client leaves."""

    def __init__(self) -> None:
        self.go_on, self.left = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        going = asyncio.create_task(self.go_on.wait())
        leaving = asyncio.create_task(receive())
        await asyncio.wait((going, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.left.set()
            going.cancel()
            return
        leaving.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": False})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path and the body, one answer a line."""
    message, body = await receive(), b""
    while message["more_body"]:
        body += message["body"]
        message = await receive()
    answer = b"%b %b\n" % (scope["path"].encode(), body + message["body"])
    head = [(b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": answer, "more_body": False})


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"


FRAMED = {
    "length": b"Content-Length: 5\r\n\r\nhello",
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("body", FRAMED)
@pytest.mark.parametrize("step", [1, 100, 1 << 16])
async def test_the_offer_of_another_protocol_costs_a_request_nothing(body: str, step: int) -> None:
    """Java's client offers HTTP/2 with its first request, a body among it: however that arrives,
    and whatever follows on the connection, the answer is that of a request without the offer."""
    post = b"POST /%d HTTP/1.1\r\nHost: x\r\n" + H2C + FRAMED[body]
    get = b"GET /3 HTTP/1.1\r\nHost: x\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert await _answers(post % 1 + post % 2 + get, step) == [b"/1 hello", b"/2 hello", b"/3 "]
    old = b"POST /1 HTTP/1.0\r\n" + H2C + FRAMED["length"]
    assert await _answers(old, step) == [b"/1 hello"]


async def _answers(sent: bytes, step: int) -> list[bytes]:
    """What `echo` answers to these bytes, of which so many are sent at a time."""
    port = free_port()
    server = HttpServer(echo, HOST, port)
    await server.open()
    try:
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(HOST, port)
            for begin in range(0, len(sent), step):
                writer.write(sent[begin : begin + step])
                await asyncio.sleep(0)
            answers = await reader.read()
            writer.close()
    finally:
        await server.close()
    return [line for line in answers.split(b"\n") if line.startswith(b"/")]


async def test_a_successor_opens_the_port_while_the_old_server_finishes_its_answers() -> None:
    port = free_port()
    old, new = Slow(b"old"), Slow(b"new")
    old_server, new_server = HttpServer(old, HOST, port), HttpServer(new, HOST, port)
    await old_server.open()
    url = f"http://{HOST}:{port}/"
    async with httpx.AsyncClient() as client, client.stream("GET", url) as answer:
        parts = answer.aiter_raw()
        assert await anext(parts) == b"old"
        closing = asyncio.create_task(old_server.close())
        await new_server.open()
        new.go_on.set()
        while (await client.get(url)).content != b"new!":  # until the old one's socket is gone
            pass
        assert not closing.done()
        old.go_on.set()
        assert b"".join([part async for part in parts]) == b"!"
        await closing
        assert answer.headers["date"]
    await new_server.close()


async def test_a_server_that_closes_answers_whoever_has_asked_already() -> None:
    """Those it has accepted but not read, and more than it accepts at once of those who wait."""
    port = free_port()
    server = HttpServer(echo, HOST, port)
    await server.open()
    asked = b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n"
    with ExitStack() as opened:

        def connect() -> socket.socket:
            return opened.enter_context(socket.create_connection((HOST, port), timeout=30))

        clients = [connect()]
        async with httpx.AsyncClient() as client:  # once it is answered, the first is accepted
            assert (await client.get(f"http://{HOST}:{port}/2")).content == b"/2 \n"
        clients += [connect() for _ in range(70)]
        for one in clients:
            one.sendall(asked)
        await server.close()
        for one in clients:
            answer = one.makefile("rb").read()  # to the connection's end
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.endswith(b"/1 \n")


@pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="names of sockets are Linux's")
async def test_a_port_is_shared_within_one_application_alone() -> None:
    port = free_port()
    owners = [("a", HOST), ("a", HOST), ("b", "127.0.0.2")]
    servers = [HttpServer(Slow(b""), host, port, owner=owner) for owner, host in owners]
    await asyncio.gather(*[server.open() for server in servers])
    for host in (HOST, "0.0.0.0"):
        with pytest.raises(OSError, match="another application of Legato answers there"):
            await HttpServer(Slow(b""), host, port, owner="b").open()
    await asyncio.gather(*[server.close() for server in servers])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as of_another_program:
        of_another_program.bind(b"\0a name in no encoding\xff\xfe")
        successor = HttpServer(Slow(b""), HOST, port, owner="b")
        await successor.open()
    await successor.close()


@pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="names of sockets are Linux's")
def test_of_applications_that_begin_at_once_one_gets_the_port() -> None:
    begin = threading.Barrier(3)

    def claim(owner: str, port: int) -> socket.socket | None:
        begin.wait()
        try:
            return http_server._claim(HOST, port, owner)
        except OSError:
            return None

    with ThreadPoolExecutor(3) as pool:
        for port in range(1, 31):  # no names of a server's, whose ports are higher
            claims = [one for one in pool.map(claim, "abc", [port] * 3) if one is not None]
            assert len(claims) == 1
            claims[0].close()


async def test_heads_without_end_and_without_haste_are_cut(monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "HEAD_LIMIT_S", 0.2)
    port = free_port()
    server = HttpServer(Slow(b""), HOST, port)
    await server.open()

    async def answer_to(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(data)
        with suppress(ConnectionError):
            return await reader.read()  # the server's end of the connection, or this hangs
        return b""

    try:
        async with asyncio.timeout(30):
            assert await answer_to(b"") == b""
            assert b" 408 " in await answer_to(b"GET / HTTP/1.1\r\nHost: x")
            endless = b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * (MAX_HEAD_BYTES // 6 + 9)
            assert b" 431 " in await answer_to(endless)
    finally:
        await server.close()


async def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_its_connection() -> None:
    port, app = free_port(), Slow(b"half")
    server = HttpServer(app, HOST, port)
    await server.open()
    try:
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            assert await reader.readexactly(4) == b"half"
            app.go_on.set()
            assert await reader.read() == b"!"
            writer.close()
    finally:
        app.go_on.set()  # or closing would wait for the answer
        await server.close()


@pytest.mark.parametrize("stays", [True, False])
async def test_a_client_that_closes_its_own_side_gets_its_answer(
    monkeypatch: Any, stays: bool
) -> None:
    """One that has left, which looks the same at first, frees its request before that."""
    monkeypatch.setattr(connections, "_HALF_CLOSED_S", 0.01)
    port, app = free_port(), Late()
    server = HttpServer(app, HOST, port)
    await server.open()
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    writer.write_eof()
    async with asyncio.timeout(20):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        if stays:
            app.go_on.set()
            answer = await reader.read()  # to the end of the connection
            assert b"HTTP/1.1 200 OK\r\n" in answer
            assert b"half" in answer
            writer.close()
        else:
            writer.close()
            await app.left.wait()
    await server.close()


class Probed(asyncio.Event):
    """Set once a half-closed client has been probed this many times."""

    def __init__(self, num_times: int, monkeypatch: Any) -> None:
        super().__init__()
        self.num_left = num_times
        probe = RequestProtocol._probe_half_closed

        def counted(protocol: RequestProtocol, period_s: float) -> None:
            probe(protocol, period_s)
            self.num_left -= 1
            if self.num_left <= 0:
                self.set()

        monkeypatch.setattr(RequestProtocol, "_probe_half_closed", counted)
        monkeypatch.setattr(connections, "_HALF_CLOSED_S", 0.001)
        monkeypatch.setattr(connections, "_PROBE_EVERY_S", 0.001)


async def test_no_interim_answer_is_written_into_the_body_of_an_earlier_request(
    monkeypatch: Any,
) -> None:
    port, first, second = free_port(), Slow(b"half"), Late()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/first":
            await receive()
            await first(scope, receive, send)
        else:
            await second(scope, receive, send)

    server = HttpServer(answer, HOST, port)
    await server.open()
    probed = Probed(3, monkeypatch)
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(
        b"".join(b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % p for p in (b"first", b"second"))
    )
    writer.write_eof()
    async with asyncio.timeout(20):
        await probed.wait()
        first.go_on.set()
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readuntil(b"0\r\n\r\n") == b"4\r\nhalf\r\n1\r\n!\r\n0\r\n\r\n"
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        second.go_on.set()
        assert (await reader.read()).endswith(b"4\r\nhalf\r\n0\r\n\r\n")
    writer.close()
    await server.close()


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_client_that_leaves_with_requests_queued_frees_the_first(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture, at_once: bool
) -> None:
    """Also where they came after the first had begun, so that nothing is read any more."""
    monkeypatch.setattr(connections, "_HALF_CLOSED_S", 0.01)
    port, app = free_port(), Late()
    begun, served = asyncio.Event(), list[str]()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        served.append(scope["path"])
        await app(scope, receive, send)

    server = HttpServer(answer, HOST, port)
    await server.open()
    _, writer = await asyncio.open_connection(HOST, port)
    first, *queued = (b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % n for n in range(3))
    async with asyncio.timeout(20):
        if not at_once:
            writer.write(first)
            await begun.wait()
            first = b""
        writer.write(first + b"".join(queued))
        await writer.drain()
        writer.close()
        await app.left.wait()
        await server.close()
    assert served == ["/0"]
    assert not caplog.records


async def test_requests_queued_on_a_half_closed_connection_are_all_answered(
    monkeypatch: Any,
) -> None:
    """Also those that came after reading had paused."""
    monkeypatch.setattr(connections, "_HALF_CLOSED_S", 0.001)
    port, app = free_port(), Late()
    begun, is_read = asyncio.Event(), asyncio.Event()
    watch = RequestProtocol.eof_received

    def at_end(protocol: RequestProtocol) -> bool:
        is_read.set()
        return watch(protocol)

    monkeypatch.setattr(RequestProtocol, "eof_received", at_end)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await app(scope, receive, send)

    server = HttpServer(answer, HOST, port)
    await server.open()
    reader, writer = await asyncio.open_connection(HOST, port)
    get = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    async with asyncio.timeout(20):
        writer.write(get)
        await begun.wait()
        writer.write(get)
        writer.write(get)
        writer.write_eof()
        await is_read.wait()
        app.go_on.set()
        assert (await reader.read()).count(b"HTTP/1.1 200 OK\r\n") == 3
    writer.close()
    await server.close()


@pytest.mark.parametrize("expects", [b"", b"expect: 100-continue\r\n"])
async def test_a_request_gets_at_most_five_interim_answers(
    monkeypatch: Any, expects: bytes
) -> None:
    port, app = free_port(), Late()
    server = HttpServer(app, HOST, port)
    await server.open()
    probed = Probed(9, monkeypatch)
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + expects + b"\r\n")
    writer.write_eof()
    async with asyncio.timeout(20):
        await probed.wait()
        app.go_on.set()
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1 100 Continue\r\n\r\n") == 5
    assert answer.endswith(b"4\r\nhalf\r\n0\r\n\r\n")
    writer.close()
    await server.close()


MALFORMED = {
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03": 400,  # TLS
    b"hello\r\n\r\n": 400,
    b"FETCH / HTTP/1.1\r\nHost: x\r\n\r\n": 400,
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n": 400,
    b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * MAX_HEAD_BYTES): 431,
}


@pytest.mark.parametrize("sent", MALFORMED, ids=range(len(MALFORMED)))
async def test_what_is_no_request_gets_an_error_object_and_is_counted(sent: bytes) -> None:
    port, errors = free_port(), Counter[tuple[int, str]]()
    server = HttpServer(echo, HOST, port, errors=errors)
    await server.open()
    try:
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(sent)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
    finally:
        await server.close()
    assert head.startswith(b"HTTP/1.1 %d " % MALFORMED[sent])
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert errors == {(MALFORMED[sent], "invalid_request_error"): 1}


async def test_what_is_no_request_waits_for_the_answers_before_it() -> None:
    """It was written into the body of the one under way."""
    port, app = free_port(), Slow(b"half")
    server = HttpServer(app, HOST, port)
    await server.open()
    reader, writer = await asyncio.open_connection(HOST, port)
    async with asyncio.timeout(30):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"half\r\n")
        writer.write(b"nonsense\r\n\r\n")
        await writer.drain()
        (protocol,) = server._server.server_state.connections
        while not protocol._is_refused:  # noqa: ASYNC110 (it does not tell)
            await asyncio.sleep(0)
        app.go_on.set()
        assert await reader.read() == b"1\r\n!\r\n0\r\n\r\n"
        writer.close()
    await server.close()


async def test_connections_beyond_the_limit_are_told_to_come_again() -> None:
    port, app = free_port(), Slow(b"")
    app.go_on.set()
    errors = Counter[tuple[int, str]]()
    server = HttpServer(app, HOST, port, max_connections=2, errors=errors)
    await server.open()
    held = [await asyncio.open_connection(HOST, port) for _ in range(2)]
    url = f"http://{HOST}:{port}/"
    try:
        async with asyncio.timeout(30), httpx.AsyncClient() as client:
            refused = await client.get(url)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "overloaded"
            assert errors == {(503, "overloaded"): 1}
            held.pop()[1].close()
            while (await client.get(url)).status_code == 503:  # until the server has noticed
                pass
    finally:
        for _, writer in held:
            writer.close()
        await server.close()


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process can open nothing."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    opened = list[int]()
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for file in opened:
            os.close(file)


@pytest.mark.heavy
async def test_connections_without_a_file_left_are_told_to_come_again() -> None:
    """More of them than files are held back; none is closed, or left, without an answer."""
    port, app = free_port(), Slow(b"")
    app.go_on.set()
    errors = Counter[tuple[int, str]]()
    server = HttpServer(app, HOST, port, errors=errors)
    await server.open()
    clients = [socket.socket() for _ in range(40)]  # which need files too
    loop = asyncio.get_running_loop()

    async def answer_to(client: socket.socket) -> bytes:
        client.setblocking(False)
        await loop.sock_connect(client, (HOST, port))
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := await loop.sock_recv(client, 1 << 16):
            answer += part
        return answer

    try:
        async with asyncio.timeout(30):
            with no_more_files():
                answers = await asyncio.gather(*map(answer_to, clients))
            refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503 ")]
            assert len(refused) > len(clients) / 2
            assert errors == {(503, "overloaded"): len(refused)}
            assert all(b"retry-after: 1" in answer for answer in refused)
            # Where something else of this process gives a file back.
            assert all(a.startswith(b"HTTP/1.1 200 ") for a in answers if a not in refused)
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"http://{HOST}:{port}/")).status_code == 200
    finally:
        for one in clients:  # not before: the server would have its file
            one.close()
        await server.close()
