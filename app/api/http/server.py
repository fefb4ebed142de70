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
import errno
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import formatdate
from typing import Any, Final, Protocol

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.api.http.errors import ApiError
from app.api.http.refusals import Refused, Reserve, overloaded, send_last
from app.api.http.stalled import StalledClients

HEAD_LIMIT_S: Final = 30.0
MAX_HEAD_BYTES: Final = 1 << 16
LINGER_S: Final = 5.0  # for a client to send the rest of a body that is not read any more
_NUM_ACCEPTED_AT_ONCE: Final = 64
_NO_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LOOK_AGAIN_S: Final = 0.1
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
    _is_refused = False
    _is_body_read = True
    _num_head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = getattr(self.config, "max_connections", None)
        if limit is not None and len(self.connections) > limit:
            self.connections.discard(self)
            self._refuse(overloaded("Too many connections are open."))
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
        if self._is_refused:
            return
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
        self._is_refused = True
        self._expect_head(False)
        send_last(self.transport, error)


class Listener:
    """Accepts connections, and refuses them with an answer while no more files may be opened.

    The event loops' own ways: asyncio's leaves such connections waiting, a second at a time, and
    libuv's closes them without a word, which a client cannot tell from a crash.
    """

    def __init__(
        self, listening: socket.socket, make_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        """listening: does not block; the listener closes it. To be made on the running loop."""
        self._socket = listening
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._reserve = Reserve()
        self._opening: set[asyncio.Task[None]] = set()
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept nothing more."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._reserve.close()

    def _accept(self) -> None:
        for _ in range(_NUM_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_FILES:
                    raise
                self._refuse_next()
                return
            self._open(connection, self._make_protocol)

    def _open(self, connection: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        connection.setblocking(False)

        async def open_it() -> None:
            try:
                await self._loop.connect_accepted_socket(make, connection)
            except OSError:  # it is gone already
                connection.close()

        task = self._loop.create_task(open_it())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _refuse_next(self) -> None:
        """One connection in the place of a file held back. Where another thread takes the place,
        the connection waits."""
        if self._reserve.give():
            with suppress(OSError):
                connection, _ = self._socket.accept()
                self._open(connection, lambda: Refused(self._reserve.fill))
                return
        self._loop.remove_reader(self._socket)  # or it would call without end
        self._loop.call_later(_LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        if self._socket.fileno() >= 0:
            self._reserve.fill()
            self._loop.add_reader(self._socket, self._accept)
