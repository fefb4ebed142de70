"""HTTP straight from the replica, and what a request passes before the application sees it.

Where one replica is all there is (`listen` in the settings, `proxy_location: Disabled`), a load
balancer only copies every token once more and keeps two idle processes beside the engine. Several
replicas keep Serve's HAProxy, which knows them all. There Serve reads some request headers on its
own account, ahead of any application: with
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=app.api.http.server.middlewares` in the environment of
replicas (or of Serve's Python proxies) those are gone by then.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final, Protocol

import uvicorn
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.api.http.errors import ApiError
from app.api.http.stalled import StalledClients

logger = logging.getLogger("legato.http")

KEEP_ALIVE_S: Final = 30  # an idle connection's life between two requests
HEAD_LIMIT_S: Final = 30.0
MAX_HEAD_BYTES: Final = 1 << 16
LINGER_S: Final = 5.0  # for a client to send the rest of a body that is not read any more
_MOST_FILES: Final = 1 << 16
_SPARE_FILES: Final = 512  # for everything that is no connection
# With these a client could switch off the notice of its own disconnect, or set Serve's deadline.
INTERNAL_HEADERS: Final = frozenset(
    {b"x-request-disconnect-disabled", b"x-request-timeout-seconds"}
)
TRANSPORT: Final = "legato.transport"
BODY_WRITER: Final = "legato.body_writer"  # a BodyWriter, where the server has one


class BodyWriter(Protocol):
    """A response's way to its connection for code that cannot wait: ASGI's `send` is a coroutine
    through every layer that wraps it."""

    def is_open(self) -> bool:
        """True between the response's head and its end, while the client keeps up."""
        ...

    def write(self, body: bytes) -> None:
        """Write a part of a streamed body now."""
        ...


def entered(scope: Scope, send: Send) -> Scope:
    """The scope as the application shall see it: no internal headers, the connection known."""
    if scope["type"] != "http" or scope.get(TRANSPORT) is not None:
        return scope
    headers = [pair for pair in scope["headers"] if pair[0] not in INTERNAL_HEADERS]
    transport = transport_of(send)
    send_at_once(transport)
    return {**scope, "headers": headers, TRANSPORT: transport}


class Ingress:
    """ASGI middleware, outermost. stalled: what drops clients that stop reading, if it is here.
    adapted: by the first two parts of a path (/v1/messages), the application for what is there and
    below, in place of `app`."""

    def __init__(
        self,
        app: ASGIApp,
        stalled: StalledClients | None = None,
        adapted: Mapping[str, ASGIApp] | None = None,
    ) -> None:
        self._app = app
        self._stalled = stalled
        self._adapted = adapted or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = entered(scope, send)
        transport = scope.get(TRANSPORT)
        head = "/".join(scope.get("path", "").split("/", 3)[:3])
        app = self._adapted.get(head, self._app)
        if transport is None or self._stalled is None:
            await app(scope, receive, send)
            return
        self._stalled.enter(transport)
        try:
            await app(scope, receive, send)
        finally:
            self._stalled.leave(transport)


def transport_of(send: Send) -> Any:
    """The connection behind a server's own `send`, None where there is none to be had.

    ASGI has no way to drop a client that stopped reading: closing waits for its buffer.
    """
    return getattr(getattr(send, "__self__", None), "transport", None)


def send_at_once(transport: Any) -> None:
    """Turn Nagle's algorithm off, which would hold a token back until the last one is acknowledged.

    asyncio does so itself, but not for a listening socket made without naming the protocol, which
    is how servers make theirs: 40 ms were seen between a response's head and its body.
    """
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def middlewares() -> list[Middleware]:
    """For Serve's callback."""
    return [Middleware(Ingress)]


class _Config(uvicorn.Config):
    max_connections: int | None = None


def _num_files() -> int:
    """How many files this process may hold open, raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class HttpServer:
    """An HTTP server on the running event loop.

    The port is shared (SO_REUSEPORT), so that a replica's successor opens it while the
    predecessor, which accepts nothing any more, still finishes its streams.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, *, max_connections: int = 8192) -> None:
        self._address = (host, port)
        config = _Config(
            app,
            http=RequestProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.max_connections = min(max_connections, _num_files() - _SPARE_FILES)
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)

    async def open(self) -> None:
        """Accept connections; raises OSError where the address cannot be had."""
        listener = socket.create_server(
            self._address,
            family=socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET,
            reuse_port=True,
        )
        # Not `Server.serve`: its loop wakes ten times a second, for a header.
        await self._server.startup(sockets=[listener])
        logger.info("listening on %s:%d", *listener.getsockname()[:2])

    async def close(self) -> None:
        """Accept nothing more, and return once every open answer is finished."""
        await self._server.shutdown()


class _ConnectionWriter:
    """Implements `BodyWriter`: what `RequestResponseCycle.send` does with a chunk."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def is_open(self) -> bool:
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding  # the head has gone out
            and not cycle.flow.write_paused
            and not cycle.transport.is_closing()
        )

    def write(self, body: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class RequestProtocol(HttpToolsProtocol):
    """uvicorn's, with limits to the size and the age of a request's head, which it lacks."""

    _in_head = True
    _is_body_read = True
    _num_head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = getattr(self.config, "max_connections", None)
        if limit is not None and len(self.connections) > limit:
            self._refuse(
                ApiError(
                    503, "Too many connections are open.", code="overloaded", retry_after_s=1.0
                )
            )
            return
        self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._num_head_bytes = True, 0
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._in_head, self._is_body_read = False, False
        self._expect_head(False)
        now = formatdate(usegmt=True).encode()
        self.server_state.default_headers = [(b"date", now)]
        super().on_headers_complete()
        cycle = self.cycle
        cycle.scope[BODY_WRITER] = _ConnectionWriter(cycle)  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_body_read = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_body_read:
            self.loop.call_later(LINGER_S, self._end_unread, self.cycle)

    def _end_unread(self, cycle: RequestResponseCycle) -> None:
        if self.cycle is cycle and not self._is_body_read:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(ApiError(431, f"The head is larger than {MAX_HEAD_BYTES} bytes."))

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_head(False)
        super().connection_lost(exc)

    def _expect_head(self, expected: bool = True) -> None:
        """A client that connects and says nothing, or not all, is let go after a while."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if expected:
            self._head_timer = self.loop.call_later(HEAD_LIMIT_S, self._end_head)

    def _end_head(self) -> None:
        if self._num_head_bytes:
            self._refuse(ApiError(408, f"The head did not arrive within {HEAD_LIMIT_S:g} s."))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer ahead of any application, and let the connection go."""
        body = error.body()
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            *(f"{name}: {value}" for name, value in error.all_headers().items()),
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()
