"""One HTTP exchange: reads the body within limits, sends the answer, watches the client."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.types import Receive, Scope, Send

from app.api.http.connections import BODY_WRITER, BodyWriter
from app.api.http.errors import ApiError, invalid
from app.api.http.options import ApiOptions
from app.api.http.validation import check_size, complaint, unreadable

_PART_BYTES: Final = 1 << 18  # of a response that are sent at a time

_Model = TypeVar("_Model", bound=BaseModel)


class ClientGone(Exception):
    """The client closed the connection: there is nothing to answer."""


class Call:
    """One HTTP request being served."""

    __slots__ = (
        "_num_admitted",
        "_receive",
        "_send",
        "arrived_s",
        "options",
        "scope",
        "started",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, options: ApiOptions) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._num_admitted = 0  # prompt tokens taken from the key's allowance
        self.options = options
        self.arrived_s = time.monotonic()
        self.started = False  # the response has begun, so an error can no longer have a status

    @property
    def request_id(self) -> str:
        return str(self.scope["state"]["request_id"])

    @property
    def key_name(self) -> str:
        """A short digest of the API key used, "" without keys: requests' default tenant."""
        return str(self.scope["state"].get("key_name", ""))

    def tenant(self, user: str | None) -> str:
        """The tenant for limits and fair shares: the key, whatever `user` the request names;
        without keys the `user`.
        """
        return self.key_name or user or ""

    def cache_salt(self, user: str | None) -> str:
        """The salt of the prefix cache: requests share cached prompts only if it is equal."""
        return "/".join(part for part in (self.key_name, user) if part)

    def check_admin(self) -> None:
        """Raises 403 unless the caller may change settings: by a key with that role or, without any
        keys, on a server that only this machine reaches."""
        allowance = self.scope["state"].get("allowance")
        if not (self.options.is_local if allowance is None else allowance.is_admin):
            raise ApiError(
                403,
                "Settings are changed with a key that has `admin: true` (api.api_keys), or without "
                "keys on a loopback address.",
                code="admin_only",
            )

    def check_priority(self, priority: int | None) -> int:
        """Check the priority against the key's limit; raises 403 naming it."""
        allowance = self.scope["state"].get("allowance")
        limit = None if allowance is None else allowance.max_priority
        if limit is not None and (priority or 0) > limit:
            raise ApiError(403, f"This key may ask for at most priority {limit}.", "priority")
        return priority or 0

    def admit_tokens(self, num_prompt_tokens: int) -> None:
        """Take the prompt from the key's token allowance; raises 429 when it is used up."""
        allowance = self.scope["state"].get("allowance")
        if allowance is not None:
            allowance.admit_prompt(num_prompt_tokens)
            self._num_admitted = num_prompt_tokens

    def charge(self, num_completion_tokens: int) -> None:
        """Take generated tokens from the key's allowance, which may go into debt."""
        allowance = self.scope["state"].get("allowance")
        if allowance is not None:
            allowance.charge_tokens(num_completion_tokens)

    def header(self, name: bytes) -> bytes | None:
        """The first header of this (lower-case) name."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    async def read_json(self, model: type[_Model]) -> _Model:
        """Read and check the body; raises ApiError 400, 408, 413 or 415."""
        content_type = (self.header(b"content-type") or b"").split(b";")[0].strip().lower()
        if content_type != b"application/json":
            raise ApiError(415, "The body must be JSON: send 'Content-Type: application/json'.")
        return _parse_body(model, await self._read_body(), self.options.max_json_nodes)

    async def _read_body(self) -> bytes:
        try:
            async with asyncio.timeout(self.options.body_timeout_s):
                parts = self.body_parts(self.options.max_body_bytes, "api.max_body_bytes")
                return b"".join([part async for part in parts])
        except TimeoutError:
            raise too_slow(self.options.body_timeout_s) from None

    async def body_parts(self, limit: int, setting: str) -> AsyncGenerator[bytes, None]:
        """The body as it arrives; raises ApiError 413 for more than `limit` bytes, naming the
        setting that limits it, and 415 for a compressed one."""
        encoding = (self.header(b"content-encoding") or b"identity").strip().lower()
        if encoding != b"identity":
            raise ApiError(415, "The body must be sent as it is, without a Content-Encoding.")
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared[:20]) > limit:
            raise _too_large(limit, setting)
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > limit:
                raise _too_large(limit, setting)
            yield part
            if not message.get("more_body", False):
                return

    def watch_client(self) -> ClientWatch:
        """A context that ends with ClientGone as soon as the client disconnects."""
        return ClientWatch(self._receive)

    @property
    def body_writer(self) -> BodyWriter | None:
        """Writes parts of a streamed body without waiting; None if the server has none."""
        return self.scope.get(BODY_WRITER)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the response's head."""
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()],
            }
        )

    async def send(self, body: bytes, more: bool = True) -> None:
        """Send a part of the response's body; waits while the client's buffer is full."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def reply(
        self,
        status: int,
        body: bytes | Sequence[bytes],
        headers: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> None:
        """Send a whole response; a large one in parts, as the client takes them.

        body: in parts, which are sent in order.
        """
        parts = [body] if isinstance(body, bytes) else body
        num_bytes = sum(map(len, parts))
        head = {"content-type": content_type, "content-length": str(num_bytes), **(headers or {})}
        await self.start(status, head)
        last = b""
        for part in _of_a_size(parts):
            if last:
                await self.send(last)
            last = part
        await self.send(last, more=False)

    async def reply_json(self, content: Any) -> None:
        """Send 200 with this content, which must be small, as it is written at once."""
        await self.reply(200, json.dumps(content, allow_nan=False).encode())

    def give_back(self, error: ApiError) -> None:
        """Give a prompt that was refused, or that the server has no room for, back to the key:
        trying again would otherwise use up its allowance."""
        if error.status < 500 or error.status == 503:
            self.charge(-self._num_admitted)
            self._num_admitted = 0

    async def reply_error(self, error: ApiError) -> None:
        """Send the error object with its status."""
        self.give_back(error)
        await self.reply(error.status, error.body(), error.all_headers())


def _of_a_size(parts: Sequence[bytes]) -> Iterator[bytes]:
    """The same bytes, in parts of _PART_BYTES and a last one."""
    gathered: list[bytes] = []
    num_bytes = 0
    for part in parts:
        for start in range(0, len(part), _PART_BYTES):
            piece = part[start : start + _PART_BYTES]
            gathered.append(piece)
            num_bytes += len(piece)
            if num_bytes >= _PART_BYTES:
                yield b"".join(gathered)
                gathered.clear()
                num_bytes = 0
    yield b"".join(gathered)


def too_slow(limit_s: float) -> ApiError:
    """408: a body took too long to arrive."""
    return ApiError(
        408, f"The body did not arrive within {limit_s:g} s.", headers={"connection": "close"}
    )


def _too_large(limit: int, setting: str) -> ApiError:
    """The connection stays open: servers discard the rest, so that the client can read this."""
    return ApiError(413, f"The body is larger than {limit} bytes (setting {setting}).")


class ClientWatch:
    """Cancels what runs inside when the client disconnects; then raises ClientGone.

    Call `stop` before the last part of a response is sent: after it, servers report a finished
    exchange as a disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._task: asyncio.Task[Any] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ClientWatch:
        self._task = asyncio.current_task()
        self._watch = asyncio.create_task(self._wait())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if self._gone and kind is not None and issubclass(kind, asyncio.CancelledError):
            if self._task is not None and self._task.uncancel() > 0:
                return  # also cancelled from elsewhere, which takes effect
            raise ClientGone from None

    def stop(self) -> None:
        """Stop watching."""
        watch, self._watch = self._watch, None  # it refers to this
        if watch is not None:
            watch.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if self._task is not None:
            self._task.cancel()


def _parse_body(model: type[_Model], body: bytes, max_nodes: int) -> _Model:
    """Parse JSON (depth at most 200, UTF-8) and validate it; raises ApiError 400.

    NaN and Infinity are parsed, so that they can be refused by the name of their parameter.
    max_nodes bounds objects, lists and members together: a body of two megabytes can hold a million
    of them, and checking those would stop every stream of the process for half a second.
    """
    # Counting bytes is fast and never too low; only above the limit is counted exactly.
    if body.count(b"{") + body.count(b"[") + body.count(b":") > max_nodes:
        check_size(body, max_nodes)
    try:
        content = _parse(body)
    except ValueError as error:
        raise unreadable(body, str(error)) from None
    if not isinstance(content, dict):
        raise invalid("The body must be a JSON object.")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise complaint(error, content, model) from None


def _parse(body: bytes) -> Any:
    """Parse without the garbage collector running at every few hundred new objects."""
    if not gc.isenabled():
        return from_json(body, allow_inf_nan=True)
    gc.disable()
    try:
        return from_json(body, allow_inf_nan=True)
    finally:
        gc.enable()
