"""What must happen to a request before Ray Serve itself looks at it.

Serve reads some request headers on its own account, ahead of any application. Set
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=app.api.http.ingress.middlewares` where replicas (or
Serve's Python proxies) run, and they are gone by then. The application does the same for other
servers.
"""

from __future__ import annotations

import socket
from typing import Any, Final, Protocol

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

# With these a client could switch off the notice of its own disconnect, or set Serve's deadline.
INTERNAL_HEADERS: Final = frozenset(
    {b"x-request-disconnect-disabled", b"x-request-timeout-seconds"}
)
TRANSPORT: Final = "legato.transport"
BODY_WRITER: Final = "legato.body_writer"  # a BodyWriter, where the server has one


class BodyWriter(Protocol):
    """A response's way to its connection for whoever cannot wait: ASGI's `send` is a coroutine
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
    """ASGI middleware, outermost."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(entered(scope, send), receive, send)


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
