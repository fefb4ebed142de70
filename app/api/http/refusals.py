"""Answers to connections that cannot be served, before any application, and offers declined; what
the system knows of a connection."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import select
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.api.http.errors import ApiError

_LINGER_S: Final = 1.0  # for a client to read its refusal
_NUM_RESERVED: Final = 8
_COMPLAIN_EVERY_S: Final = 10.0
_logger = logging.getLogger("legato.http")


def overloaded(message: str) -> ApiError:
    """503, with Retry-After."""
    return ApiError(503, message, code="overloaded", retry_after_s=1.0)


def too_large(most_bytes: int) -> ApiError:
    return ApiError(431, f"The head is larger than {most_bytes} bytes.")


def malformed(target: bytes, most_bytes: int) -> ApiError:
    """Of a request that the parser refuses, as it does one whose target is too long."""
    if len(target) >= most_bytes:
        return too_large(most_bytes)
    return ApiError(400, "This is no request of HTTP that the server can read.")


NO_FILE_LEFT: Final = overloaded("This server can open no more files.")


def send_last(transport: asyncio.Transport, error: ApiError) -> None:
    """Send a refusal, and close once the client has closed, or after a short time: closing with an
    unread request would reset the connection, and the answer could be lost."""
    if transport.is_closing():
        return
    body = error.body()
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in error.all_headers().items()),
    ]
    transport.write("\r\n".join([*lines, "", ""]).encode() + body)
    transport.write_eof()
    asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)


def without_offer(protocol: HttpToolsProtocol) -> bytes:
    """The head that was read last, without its offer of another protocol, for a parser anew: none
    is spoken here, and a server may pass over it."""
    parser = protocol.parser
    version = parser.get_http_version().encode()
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), protocol.url, version)]
    lines += [b"%b: %b" % pair for pair in protocol.headers if pair[0] != b"upgrade"]
    protocol.parser = type(parser)(protocol)
    protocol.parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return b"\r\n".join([*lines, b"", b""])


def in_kernel(transport: Any) -> int:
    """Bytes that the system holds because the client's has not acknowledged them: they become fewer
    even while a slow reader leaves no room for more."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return 0
    try:
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:  # closed by now, or a system without this call
        return 0
    return int.from_bytes(answer, sys.byteorder)


def reset(transport: Any) -> None:
    """Close without waiting: else the kernel would keep the connection for what was not taken."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def is_reset(transport: Any, events: int = 0) -> bool:
    """Whether the connection has an error, both its sides are closed, or one of these events."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), events)
    return bool(poll.poll(0))


def has_sent_all(transport: Any) -> bool:
    """Whether the client has closed its own side, however much is still to be read from it."""
    return is_reset(transport, getattr(select, "POLLRDHUP", 0))  # Linux's


class Refused(asyncio.Protocol):
    """A connection that uses a reserved file. on_end: called when it is free again."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        send_last(transport, NO_FILE_LEFT)

    def connection_lost(self, exc: Exception | None) -> None:
        # The loop closes the connection's file right after this call.
        asyncio.get_running_loop().call_soon(self._on_end)


class Reserve:
    """Reserved files, so that a connection can be refused when no more files may be opened."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self._is_open = True
        self._complained_s = float("-inf")
        self.fill()

    def fill(self) -> None:
        """Open as many as possible."""
        with suppress(OSError):
            while self._is_open and len(self._files) < _NUM_RESERVED:
                self._files.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def give(self) -> bool:
        """Close one, if there is one, and log it."""
        now_s = time.monotonic()
        if now_s - self._complained_s >= _COMPLAIN_EVERY_S:
            self._complained_s = now_s
            _logger.warning("no more files may be opened: new connections are refused")
        if not self._files:
            return False
        os.close(self._files.pop())
        return True

    def close(self) -> None:
        """Close all."""
        self._is_open = False
        while self._files:
            os.close(self._files.pop())
