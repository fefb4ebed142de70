"""The middleware around every handler: first the connection and internal headers, then header
limits, request id, origin, key and rate; innermost, failures become error objects.

Plain ASGI, so that streamed tokens pass through few calls. Serve itself reads some request headers
before any application: with
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=app.api.http.guard.middlewares` in the environment of
replicas (or of Serve's Python proxies) those are removed before.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.http.audit import Audit
from app.api.http.call import Call, ClientGone
from app.api.http.connections import StalledClients, send_at_once
from app.api.http.errors import ApiError, from_engine
from app.api.http.keys import KeyRing, given_key
from app.api.http.options import ApiOptions
from app.api.http.turns import Turns
from app.engine_client.client import EngineError

# With these a client could disable the notice of its disconnect, or set Serve's deadline.
INTERNAL_HEADERS: Final = frozenset(
    {b"x-request-disconnect-disabled", b"x-request-timeout-seconds"}
)
TRANSPORT: Final = "legato.transport"
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_PROBES: Final = frozenset({"/health", "/live"})
_EXPOSED: Final = (b"access-control-expose-headers", b"request-id, retry-after, x-request-id")


class _Held:
    """A connection in a scope. Serve's Python proxies pickle theirs, without it."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def entered(scope: Scope, send: Send) -> Scope:
    """The scope for the application: without internal headers, with the connection."""
    if scope["type"] != "http" or scope.get(TRANSPORT) is not None:
        return scope
    headers = [pair for pair in scope["headers"] if pair[0] not in INTERNAL_HEADERS]
    transport = transport_of(send)
    send_at_once(transport)
    return {**scope, "headers": headers, TRANSPORT: transport and _Held(transport)}


class Ingress:
    """The outermost ASGI middleware. stalled: drops clients that stop reading, if given.
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
        held: _Held | None = scope.get(TRANSPORT)
        head = "/".join(path_below(scope).split("/", 3)[:3])
        app = self._adapted.get(head, self._app)
        if held is None or self._stalled is None:
            await app(scope, receive, send)
            return
        self._stalled.enter(held.transport)
        try:
            await app(scope, receive, send)
        finally:
            self._stalled.leave(held.transport)


def path_below(scope: Scope) -> str:
    """The path, below the `route_prefix` of the application; `/` of the prefix itself."""
    return str(scope.get("path", "")).removeprefix(scope.get("root_path", "")) or "/"


def transport_of(send: Send) -> Any:
    """The connection of a server's own `send`; None if it cannot be found.

    Needed because ASGI cannot drop a client that stopped reading: closing waits for its buffer."""
    return getattr(getattr(send, "__self__", None), "transport", None)


def middlewares() -> list[Middleware]:
    """For Serve's callback."""
    return [Middleware(Ingress)]


class PageFile(Route):
    """A route of a file that the page at `/` loads. It needs no key where `/` needs none: a browser
    sends none for scripts and styles, and only these can ask the visitor for one."""


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        options: ApiOptions,
        keys: KeyRing | None,
        audit: Audit,
        errors: Counter[tuple[int, str]],
        page_files: frozenset[str] = frozenset(),
    ) -> None:
        """keys: None: none needed. errors: by status and code. page_files: of `PageFile`s."""
        self._app = app
        public = options.public_paths
        self._public = public | page_files if "/" in public else public
        self._options = options
        self._keys = keys
        self._origins = frozenset(options.allowed_origins)
        self._hosts = frozenset(host.lower() for host in options.allowed_hosts)
        self._audit = audit
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008})
            else:
                await self._app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))  # the first of several counts
        request_id = _request_id(headers.get(b"x-request-id"))
        origin = headers.get(b"origin", b"").decode("latin-1")
        host = headers.get(b"host", b"").decode("latin-1")
        extra = [(b"x-request-id", request_id.encode()), *self._cors_headers(origin, host)]

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *extra]
                if (status := message["status"]) >= 400:
                    self._errors[state.get("error") or (status, "")] += 1
            await send(message)

        state: dict[str, Any] = {**(scope.get("state") or {}), "audit": self._audit}
        state["request_id"] = request_id
        inner = {**scope, "state": state}
        try:
            self._check_headers(scope)
            path = path_below(scope)
            self._check_host(headers.get(b"host"), path, scope)
            is_preflight = (
                scope["method"] == "OPTIONS"
                and bool(origin)
                and b"access-control-request-method" in headers
            )
            if is_preflight or scope["method"] not in _SAFE_METHODS:
                self._check_origin(origin, host)
            if is_preflight:
                await _allow(headers.get(b"access-control-request-headers"), send_marked)
                return
            if self._keys is not None and path not in self._public:
                allowance = self._keys.admit(given_key(headers))
                state["allowance"] = allowance
                state["key_name"] = allowance.name
        except ApiError as error:
            self._audit.refused(scope, error.status, error.message)
            state["error"] = error.counted
            await send_error(error, send_marked)
            return
        await self._app(inner, receive, send_marked)

    def _check_headers(self, scope: Scope) -> None:
        headers = scope["headers"]
        if len(headers) > self._options.max_header_count:
            limit = f"{self._options.max_header_count} headers (setting api.max_header_count)"
            raise ApiError(431, f"More than {limit}.")
        size = sum(len(key) + len(value) for key, value in headers)
        size += len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if size > self._options.max_header_bytes:
            limit = f"{self._options.max_header_bytes} bytes (setting api.max_header_bytes)"
            raise ApiError(431, f"Headers larger than {limit}.")

    def _check_host(self, host: bytes | None, path: str, scope: Scope) -> None:
        """Refuse foreign names, but for probes, which come by any address. HTTP/1.0 needs none:
        health checkers send none, and browsers, whose pages could come by one, always do. Where all
        names are served, proxies may turn such a request into one of HTTP/1.1."""
        if self._hosts and "*" not in self._hosts and path not in _PROBES:
            if host is None and scope.get("http_version") == "1.0":
                return
            if host is None:
                raise ApiError(400, "A request of HTTP/1.1 needs a Host header.")
            try:
                name = urlsplit("//" + host.decode("latin-1")).hostname
            except ValueError:  # "[" without "]"
                name = None
            if (name or "").lower() not in self._hosts:
                raise ApiError(
                    403, "This host name is not served here (setting api.allowed_hosts)."
                )

    def _check_origin(self, origin: str, host: str) -> None:
        """Refuse pages of other sites, which could use a visitor's access to this server."""
        if origin and not self._is_allowed(origin, host):
            raise ApiError(
                403, "Requests from this origin are not allowed (setting api.allowed_origins)."
            )

    def _is_allowed(self, origin: str, host: str) -> bool:
        own = host != "" and origin.partition("://")[2].lower() == host.lower()
        return own or "*" in self._origins or origin in self._origins

    def _cors_headers(self, origin: str, host: str) -> list[tuple[bytes, bytes]]:
        """Headers that let a page of an allowed origin read the answer, also through caches."""
        if "*" in self._origins:
            return [(b"access-control-allow-origin", b"*"), _EXPOSED]
        if origin and self._is_allowed(origin, host):
            allowed = (b"access-control-allow-origin", origin.encode("latin-1"))
            return [allowed, (b"vary", b"Origin"), _EXPOSED]
        return [(b"vary", b"Origin")] if self._origins else []


async def _allow(asked: bytes | None, send: Send) -> None:
    """Answer the preflight of an allowed origin: any header may be sent, because clients add
    their own; a key among them is checked with the request itself."""
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-max-age", b"600"),
        (b"vary", b"Access-Control-Request-Headers"),
    ]
    if asked:
        headers.append((b"access-control-allow-headers", asked))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _request_id(given: bytes | None) -> str:
    """The client's own id if it is harmless, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return uuid.uuid4().hex


async def send_error(error: ApiError, send: Send) -> None:
    """Answer with an error object, outside any endpoint."""
    body = error.body()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error.all_headers(),
    }
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})


class Log(Protocol):
    def exception(self, message: str, *args: object) -> None: ...


class Endpoint:
    """An ASGI app around one handler. turns: in which requests begin; None: at once."""

    def __init__(
        self,
        handler: Callable[[Call], Awaitable[None]],
        options: ApiOptions,
        log: Log,
        turns: Turns | None = None,
    ) -> None:
        self._handler = handler
        self._options = options
        self._log = log
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send, self._options)
        try:
            if self._turns is not None:
                await self._turns.next()
            await self._handler(call)
        except ClientGone:
            return
        except (ApiError, EngineError) as error:
            await self._fail(call, error if isinstance(error, ApiError) else from_engine(error))
            # Its frames refer to it. Under overload, thousands of such cycles would be left to a
            # full collection, which holds every stream for as long as a step.
            error.__traceback__ = None
        except Exception as error:  # any other error: it is logged, and the client gets an error
            self._log.exception("request %s failed", call.request_id)
            await self._fail(call, from_engine(error))

    async def _fail(self, call: Call, error: ApiError) -> None:
        if not call.started:
            call.scope["state"]["error"] = error.counted
            await call.reply_error(error)
