"""Requests that the server sends to itself, in the name of a client."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message

from app.api.batches.runner import QUOTE, Reply
from app.api.http.errors import ApiError
from app.api.http.keys import Allowance


class InnerCalls:
    """Implements `runner.Server` over the handlers behind the guard.

    A call counts against the limits of the client's key as if it had sent it; quotes are free.
    """

    def __init__(self, app: ASGIApp, state: Mapping[str, Any]) -> None:
        """app: routes without the guard. state: what the guard knows of the client."""
        self._app = app
        self._key_name = state.get("key_name", "")
        self._allowance: Allowance | None = state.get("allowance")

    async def post(self, url: str, body: bytes) -> Reply:
        """The answer; never raises SendError."""
        request_id = uuid.uuid4().hex
        if self._allowance is not None and url != QUOTE:
            try:
                self._allowance.admit_request()
            except ApiError as error:
                retry_after = error.all_headers().get("retry-after")
                return Reply(error.status, error.body(), request_id, retry_after)
        state: dict[str, Any] = {"request_id": request_id, "key_name": self._key_name}
        if self._allowance is not None:
            state["allowance"] = self._allowance
        exchange = _Exchange(body)
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            "state": state,
        }
        await self._app(scope, exchange.receive, exchange.send)
        retry_after = exchange.headers.get(b"retry-after", b"").decode() or None
        return Reply(exchange.status, b"".join(exchange.parts), request_id, retry_after)


class _Exchange:
    """Both ends of one request without a connection."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 500
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []

    async def receive(self) -> Message:
        """The body; after it nothing, as this client stays."""
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body or b"", "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = dict(message["headers"])
        else:
            self.parts.append(message.get("body", b""))
