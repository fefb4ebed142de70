"""Server-sent events, written straight to the ASGI channel: one send per token.

An event is bytes put together from a prefix made once per request and the token's text, so the
cost of a token here is one string escape and one send.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import aclosing
from json.encoder import encode_basestring_ascii
from typing import Any, Final

from app.api.context import Context
from app.api.continuation import Piece
from app.api.generation import Generation
from app.api.http.call import Call, ClientGone
from app.api.http.errors import ApiError, from_engine
from app.api.http.ingress import BodyWriter
from app.engine.client import EngineError

_log = logging.getLogger("legato.api")

HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies must not gather tokens
}
DONE: Final = b"data: [DONE]\n\n"

# ASCII only: some clients take U+2028 and its like for line ends.
json_string: Callable[[str], str] = encode_basestring_ascii


def event(content: Any) -> bytes:
    """One `data:` event."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    """One event with a name, as /v1/responses streams them."""
    return f"event: {name}\n".encode() + event(content)


class StreamWriter(ABC):
    """Turns what a generation gives into one endpoint's events."""

    @abstractmethod
    def write(self, piece: Piece) -> bytes:
        """The events of one piece."""

    def write_text(self, index: int, text: str) -> bytes:
        """The events of a piece of continuation `index` that is text and nothing more."""
        return self.write(Piece(index, text, 0))

    @abstractmethod
    def closing(self) -> bytes:
        """The last events before [DONE]."""

    def failing(self, error: ApiError) -> bytes:
        """The last events of a stream that broke."""
        return b"data: " + error.body() + b"\n\n"


class _Outlet:
    """Events of mere text, written by whoever has them."""

    __slots__ = ("_events_of", "_write", "is_open")

    def __init__(self, body: BodyWriter, writer: StreamWriter) -> None:
        self._events_of = writer.write_text
        self._write = body.write
        self.is_open = body.is_open

    def put(self, index: int, text: str) -> None:
        if events := self._events_of(index, text):
            self._write(events)


async def stream_reply(
    call: Call, context: Context, generation: Generation, writer: StreamWriter
) -> None:
    """Send every piece as it comes.

    The head goes out with the first piece, so what is refused before it has an HTTP status. A
    failure after it becomes an error event: a stream never just ends.
    """
    reader = context.slow_readers.add()
    clock = asyncio.get_running_loop().time
    send = call.send
    body = call.body_writer
    outlet = None if body is None else _Outlet(body, writer)
    try:
        async with call.watch_client() as watch:
            try:
                async with aclosing(generation.pieces(outlet)) as pieces:
                    async for piece in pieces:
                        data = writer.write(piece)
                        if not call.started:
                            await call.start(200, HEADERS)
                        if data:
                            reader.sending_since_s = clock()
                            await send(data)
                            reader.sending_since_s = 0.0
                last = writer.closing()
            except ClientGone:
                raise
            except Exception as error:  # whatever it is, the stream must say that it ended
                if not call.started:
                    raise
                failure = error if isinstance(error, ApiError) else from_engine(error)
                if not isinstance(error, ApiError | EngineError):
                    _log.exception("request %s failed", call.request_id)
                last = writer.failing(failure)
            watch.stop()
            reader.sending_since_s = clock()
            await send(last + DONE, more=False)
    except asyncio.CancelledError:
        if not reader.dropped:
            raise
        reader.task.uncancel()
        call.abort()
        raise ClientGone from None
    finally:
        context.slow_readers.remove(reader)
