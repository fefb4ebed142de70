"""Anthropic's conventions for `/v1/messages`: its request id's header and its form of errors.

Errors are raised as elsewhere, and converted when the answer is sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.http.errors import ApiError

PREFIX: Final = "/v1/messages"
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Refusals by which Anthropic's clients know to send the same again without the parameter.
_DISPENSABLE: Final[Mapping[str | None, str]] = {"thread": "thread_unsupported_request"}


def error_type(status: int) -> str:
    """Anthropic's name of an error."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_object(error: ApiError) -> dict[str, Any]:
    """An error as an event of the stream."""
    return _object(error.status, error.message, error.param)


def _object(status: int, message: str, param: str | None) -> dict[str, Any]:
    if param and f"'{param}'" not in message and not message.startswith(param):
        message = f"{param}: {message}"
    error: dict[str, Any] = {"type": error_type(status), "message": message}
    if param in _DISPENSABLE:
        error["details"] = {"error_code": _DISPENSABLE[param], "unsupported": [param]}
    return {"type": "error", "error": error}


class AnthropicAdapter:
    """ASGI middleware, for paths below `PREFIX` alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, _Reshaper(send))


class _Reshaper:
    """Passes answers on, with their id as Anthropic's clients read it, and collects errors to
    convert them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None  # of an error
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message["headers"])
            headers += [(b"request-id", v) for k, v in headers if k.lower() == b"x-request-id"]
            message = {**message, "headers": headers}
            if message["status"] >= 400:
                self._head = message
            else:
                await self._send(message)
        elif self._head is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._reply(self._head)

    async def _reply(self, head: Message) -> None:
        headers = [(k, v) for k, v in head["headers"] if k.lower() != b"content-length"]
        request_id = next((v.decode() for k, v in headers if k == b"request-id"), None)
        error = json.loads(self._body)["error"]
        content = _object(head["status"], error["message"], error["param"])
        body = json.dumps({**content, "request_id": request_id}).encode()
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**head, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
