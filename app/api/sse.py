"""Server-sent events, written straight to the ASGI channel: one send per token.

An event is bytes put together from a prefix made once per request and the token's text, so the
cost of a token here is one string escape and one send.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import aclosing
from json.encoder import encode_basestring_ascii
from typing import Any, Final

from app.api.call import Call, ClientGone
from app.api.context import Context
from app.api.continuation import Piece
from app.api.errors import ApiError, from_engine
from app.api.generation import Generation
from app.api.ingress import BodyWriter
from app.engine import EngineError

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


class _Outlet:
    """Events of mere text, written by whoever has them."""

    __slots__ = ("_write", "_writer", "is_open")

    def __init__(self, writer: BodyWriter, write: Callable[[Piece], bytes]) -> None:
        self._writer = writer
        self._write = write
        self.is_open = writer.is_open

    def put(self, piece: Piece) -> None:
        data = self._write(piece)
        if data:
            self._writer.write(data)


async def stream_reply(
    call: Call,
    context: Context,
    generation: Generation,
    write: Callable[[Piece], bytes],
    closing: Callable[[], bytes],
    failing: Callable[[ApiError], bytes] | None = None,
) -> None:
    """Send every piece as it comes; `closing` adds the last events before [DONE].

    The head goes out with the first piece, so what is refused before it has an HTTP status. A
    failure after it becomes an error event: a stream never just ends.
    """
    reader = context.slow_readers.add()
    clock = asyncio.get_running_loop().time
    send = call.send
    writer = call.body_writer
    outlet = None if writer is None else _Outlet(writer, write)
    try:
        async with call.watch_client() as watch:
            try:
                async with aclosing(generation.pieces(outlet)) as pieces:
                    async for piece in pieces:
                        data = write(piece)
                        if not call.started:
                            await call.start(200, HEADERS)
                        if data:
                            reader.sending_since_s = clock()
                            await send(data)
                            reader.sending_since_s = 0.0
                last = closing()
            except ClientGone:
                raise
            except Exception as error:  # whatever it is, the stream must say that it ended
                if not call.started:
                    raise
                failure = error if isinstance(error, ApiError) else from_engine(error)
                if not isinstance(error, ApiError | EngineError):
                    _log.exception("request %s failed", call.request_id)
                body = failure.body()
                last = b"data: " + body + b"\n\n" if failing is None else failing(failure)
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
