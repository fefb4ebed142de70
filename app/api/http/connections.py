"""The connections of a replica's own HTTP server, from accept to their end.

For a single replica (`listen` in the settings, `proxy_location: Disabled`) a load balancer would
only copy every token once more and add two idle processes. Several replicas use Serve's HAProxy.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import weakref
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any, Final, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.api.http import refusals
from app.api.http.errors import ApiError

HEAD_LIMIT_S: Final = 30.0
MAX_HEAD_BYTES: Final = 1 << 16
LINGER_S: Final = 5.0  # for a client to send the rest of a body that will not be read
_HALF_CLOSED_S: Final = 0.25  # until the first probe of such a client, and for it to be reset
_PROBE_EVERY_S: Final = 8.0  # at least
_MOST_QUEUED: Final = 1000  # requests of a client that has sent its last, to be read
_MOST_INTERIM: Final = 5  # answers to one request; some clients accept no more
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_STALLED_EVERY_S: Final = 1.0  # period of checks for clients that have stopped reading
_HELD_BACK_BYTES: Final = 1 << 16  # with more, a server waits before it writes again
BODY_WRITER: Final = "legato.body_writer"  # a BodyWriter, where the server has one


class BodyWriter(Protocol):
    """Writes a response to its connection without waiting, as ASGI's `send` is a coroutine in every
    layer that wraps it."""

    def is_open(self) -> bool:
        """True between the response's head and its end, while the client keeps up."""

    def write(self, body: bytes) -> None:
        """Write a part of a streamed body now."""


class _ConnectionWriter:
    """Implements `BodyWriter`: what `RequestResponseCycle.send` does with a chunk."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # whose scope has this

    def is_open(self) -> bool:
        cycle = self._cycle()
        return cycle is not None and bool(
            cycle.chunked_encoding  # the head has been sent
            and not cycle.flow.write_paused
            and not cycle.transport.is_closing()
        )

    def write(self, body: bytes) -> None:
        if (cycle := self._cycle()) is not None:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class _UnframedCycle(RequestResponseCycle):
    """Answers a client of HTTP/1.0, which knows no chunks: a body without a length ends with its
    connection, which uvicorn closes after every answer to such a client."""

    _ends_with_connection = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if b"content-length" not in dict(message.get("headers", ())):
                self._ends_with_connection, self.chunked_encoding = True, False
        elif self._ends_with_connection:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class RequestProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits on the size and age of a request's head."""

    _in_head = True
    _is_refused = False
    _is_body_read = True
    _is_half_closed = _is_queue_watched = False
    _num_interim = _num_head_bytes = 0
    _offer_end = 0  # in the data, of a head that offers another protocol
    _head_timer: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None  # `cycle` is the last that was read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = getattr(self.config, "max_connections", None)
        if limit is not None and len(self.connections) > limit:
            self.connections.discard(self)
            self._refuse(refusals.overloaded("Too many connections are open."))
            return
        self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._num_head_bytes = True, 0
        self._expect_head()

    def on_headers_complete(self) -> None:
        if self._should_upgrade():
            return  # it comes again
        self._expect_head(False)
        self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        super().on_headers_complete()
        self._in_head, self._is_body_read = False, False
        cycle = self.cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.__class__ = _UnframedCycle  # uvicorn has no place to name another class
        cycle.scope[BODY_WRITER] = _ConnectionWriter(cycle)  # type: ignore[typeddict-unknown-key]
        if self.pipeline and not self._is_queue_watched:
            self._watch_queue()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _watch_queue(self) -> None:
        """While requests are queued nothing is read, and the end of what the client sends is not
        seen: read on once it has come."""
        self._is_queue_watched = bool(self.pipeline) and not self.transport.is_closing()
        if self._is_queue_watched:
            if len(self.pipeline) < _MOST_QUEUED and refusals.has_sent_all(self.transport):
                self.flow.resume_reading()
            self.loop.call_later(_HALF_CLOSED_S, self._watch_queue)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_body_read = True

    def on_response_complete(self) -> None:
        is_last = self._is_half_closed and not self.pipeline
        super().on_response_complete()
        if is_last:
            self.transport.close()
        elif not self._is_body_read:
            self.loop.call_later(LINGER_S, self._end_unread, self.cycle)

    def _end_unread(self, cycle: RequestResponseCycle) -> None:
        if self.cycle is cycle and not self._is_body_read:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        while self._offer_end:
            data, self._offer_end = refusals.without_offer(self) + data[self._offer_end :], 0
            super().data_received(data)
        if self._in_head and not self._is_refused:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(refusals.too_large(MAX_HEAD_BYTES))

    def send_400_response(self, msg: str) -> None:
        """What follows cannot be read. Whole requests before it are answered first."""
        answered = self._answered
        if answered is not None and not answered.response_complete:
            if self._is_body_read:
                self._is_refused, self.cycle.keep_alive = True, False
                return
            if answered.response_started or answered is not self.cycle:
                self.transport.close()
                return
        self._refuse(refusals.malformed(getattr(self, "url", b""), MAX_HEAD_BYTES))

    def _should_upgrade(self) -> bool:
        """Whether the parser takes what follows for another protocol's: the body would be lost, so
        the head is read again. Java's client offers HTTP/2 with its first request."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def handle_websocket_upgrade(self) -> None:
        (self._offer_end,) = getattr(sys.exception(), "args", (0,))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: who has sent its request may close its own side and
        wait for the answer. Once that has begun, an end is a client's that leaves."""
        cycle = self.cycle
        if self._is_refused or cycle is None or not self._is_body_read or self._in_head:
            return False
        if cycle.response_started or cycle.scope["http_version"] == "1.0":
            return False
        if not self._is_half_closed:
            self._is_half_closed, self._num_interim = True, int(self.expect_100_continue)
            self.loop.call_later(_HALF_CLOSED_S, self._probe_half_closed, 4 * _HALF_CLOSED_S)
        return True

    def _probe_half_closed(self, period_s: float) -> None:
        """A client that has left looks the same until something is sent to it, which its system
        resets: before an answer that takes long it is sent what any client passes over."""
        if self.transport.is_closing():
            return
        is_unanswered = self._answered is not None and not self._answered.response_started
        if is_unanswered and self._num_interim < _MOST_INTERIM:
            self._num_interim += 1
            self.transport.write(_CONTINUE)
        self.loop.call_later(_HALF_CLOSED_S, self._end_half_closed, period_s)

    def _end_half_closed(self, period_s: float) -> None:
        """Close if it has been reset; else probe again after this period."""
        if self.transport.is_closing():
            return
        if refusals.is_reset(self.transport):
            self.transport.abort()
            return
        next_s = min(4 * period_s, _PROBE_EVERY_S)
        self.loop.call_later(period_s, self._probe_half_closed, next_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_head(False)
        super().connection_lost(exc)
        if (answered := self._answered) is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()

    def _expect_head(self, expected: bool = True) -> None:
        """Start or stop the timer that drops a client without a whole head."""
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
        """Answer before any application, and close the connection."""
        self._is_refused = True
        self._expect_head(False)
        if (errors := getattr(self.config, "errors", None)) is not None:
            errors[error.counted] += 1
        refusals.send_last(self.transport, error)


def send_at_once(transport: Any) -> None:
    """Turn Nagle's algorithm off, which would delay a token until the last one is acknowledged.

    asyncio does so itself, except for listening sockets made without a protocol number, as servers
    make them: 40 ms were measured between a response's head and its body.
    """
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@dataclass(slots=True)
class _Connection:
    """num_bytes: in its buffers at the last check. since_s: the last time it may have shrunk."""

    since_s: float
    num_answers: int = 0  # under way
    num_bytes: int = 0


class StalledClients:
    """Connections of one replica; aborts one that takes nothing for timeout_s.

    ASGI does not report such clients, and closing a connection waits for its buffer. So those with
    an answer under way, or not yet taken, are checked once a second: the buffers of the process and
    of the system must have shrunk.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._connections: dict[Any, _Connection] = {}
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, transport: Any) -> None:
        """An answer begins on this connection."""
        loop = asyncio.get_running_loop()
        found = self._connections.get(transport)
        if found is None:
            found = self._connections[transport] = _Connection(loop.time())
        found.num_answers += 1
        if self._timer is None:
            self._wait(loop)

    def leave(self, transport: Any) -> None:
        """The answer has ended; the part of it that is still in the buffer is watched."""
        if (found := self._connections.get(transport)) is not None:
            found.num_answers -= 1

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        delay_s = min(_STALLED_EVERY_S, self._timeout_s)
        self._timer = loop.call_later(delay_s, self._check, loop) if self._connections else None

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        for transport, found in list(self._connections.items()):
            num_held = transport.get_write_buffer_size()
            if num_held == 0 and (found.num_answers <= 0 or transport.is_closing()):
                del self._connections[transport]
                continue
            num_bytes = num_held + refusals.in_kernel(transport) if num_held else 0
            # While it grows from little it may shrink as well: a stream goes on.
            grows = num_bytes > found.num_bytes and num_held < _HELD_BACK_BYTES
            if num_bytes < found.num_bytes or grows or found.num_bytes == 0:
                found.since_s = now_s
            elif now_s - found.since_s >= self._timeout_s:
                del self._connections[transport]
                refusals.reset(transport)
            found.num_bytes = num_bytes
        self._wait(loop)
