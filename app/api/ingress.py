"""What must happen to a request before Ray Serve itself looks at it.

Serve reads some request headers on its own account, ahead of any application. Set
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=app.api.ingress.middlewares` where replicas (or Serve's
Python proxies) run, and they are gone by then. `Guard` strips them as well, for other servers.
"""

from __future__ import annotations

from typing import Any, Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

# With these a client could switch off the notice of its own disconnect, or set Serve's deadline.
INTERNAL_HEADERS: Final = frozenset(
    {b"x-request-disconnect-disabled", b"x-request-timeout-seconds"}
)
TRANSPORT: Final = "legato.transport"


class Ingress:
    """ASGI middleware, outermost: strips internal headers, remembers the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [pair for pair in scope["headers"] if pair[0] not in INTERNAL_HEADERS]
            scope = {**scope, "headers": headers, TRANSPORT: transport_of(send)}
        await self._app(scope, receive, send)


def transport_of(send: Send) -> Any:
    """The connection behind a server's own `send`, None where there is none to be had.

    ASGI has no way to drop a client that stopped reading: closing waits for its buffer.
    """
    return getattr(getattr(send, "__self__", None), "transport", None)


def middlewares() -> list[Middleware]:
    """For Serve's callback."""
    return [Middleware(Ingress)]
