"""Server-sent events, and the answers that are sent whole: a plain token of a stream is one string
escape between two texts made once per request, written straight to the connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import aclosing
from json.encoder import encode_basestring_ascii
from typing import Any, ClassVar, Final

from app.api.generation import Generation, timing_of
from app.api.http.call import Call, ClientGone
from app.api.http.errors import ApiError, from_engine
from app.api.http.server import BodyWriter
from app.api.schema.common import StreamOptions
from app.engine_client.client import EngineError
from app.text.incremental import TextDelta, TextStream

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


def last_event(
    head: dict[str, Any], options: StreamOptions | None, usage: Any, generation: Generation
) -> bytes:
    """What a stream reports of itself at its end, where that is asked for."""
    fields: dict[str, Any] = {}
    if options is not None and options.include_usage:
        fields["usage"] = usage
    if options is not None and options.include_timing:
        fields["timing"] = timing_of(generation)
    return event({**head, "choices": [], **fields}) if fields else b""


class StreamWriter(ABC):
    """Turns what a generation gives into one endpoint's events.

    templates: per continuation, what stands before and behind the JSON string in the event of mere
    text; None (while) such an event is more than that. ending: what the last event is followed by.
    """

    ending: ClassVar[bytes] = DONE

    def __init__(self, num_continuations: int) -> None:
        self.templates: list[tuple[str, str] | None] = [None] * num_continuations

    async def prepare(self, delta: TextDelta) -> None:
        """Work that `write` of this delta needs and that is too long to be done in one go."""
        return

    @abstractmethod
    def write(self, delta: TextDelta) -> bytes:
        """The events of one delta."""

    def write_text(self, index: int, text: str) -> bytes:
        """The event of mere text, by the template of its continuation."""
        template = self.templates[index]
        if template is None:
            return self.write(TextDelta(index, text, 0))
        return f"{template[0]}{json_string(text)}{template[1]}".encode()

    @abstractmethod
    def closing(self) -> bytes:
        """The last events before [DONE]."""

    def failing(self, error: ApiError) -> bytes:
        """The last events of a stream that broke."""
        return b"data: " + error.body() + b"\n\n"


class EventSink:
    """Plain tokens of one generation to its connection. Implements `engine.client.TokenSink`."""

    __slots__ = ("_body", "_clock", "_deliveries", "_is_open", "_streams", "_templates", "_writer")

    def __init__(self, body: BodyWriter, writer: StreamWriter, generation: Generation) -> None:
        self._body = body
        self._is_open = body.is_open
        self._writer = writer
        self._templates = writer.templates
        self._streams: Sequence[TextStream] = generation.streams
        self._deliveries = generation.deliveries.tokens
        self._clock = asyncio.get_running_loop().time

    def write(self, index: int, tokens: Sequence[int]) -> bool:
        """Once per token of a stream whose client keeps up: no task wakes for it."""
        stream, num_tokens = self._streams[index], len(tokens)
        if not (stream.is_plain and self._is_open()):
            return False
        self._deliveries.append((self._clock(), num_tokens, index))
        stream.num_tokens += num_tokens
        template = self._templates[index]
        if template is not None:
            text = json_string(stream.push(tokens))
            self._body.write(f"{template[0]}{text}{template[1]}".encode())
        elif events := self._writer.write(stream.plain(tokens)):
            self._body.write(events)
        return True


async def stream_reply(call: Call, generation: Generation, writer: StreamWriter) -> None:
    """Send every delta as it comes.

    The head goes out with the first one, so what is refused before it has an HTTP status. A
    failure after it becomes an error event: a stream never just ends.
    """
    send = call.send
    body = call.body_writer
    sink = None if body is None else EventSink(body, writer, generation)
    async with call.watch_client() as watch:
        try:
            async with aclosing(generation.deltas(sink)) as deltas:
                async for delta in deltas:
                    await writer.prepare(delta)
                    data = writer.write(delta)
                    if not call.started:
                        await call.start(200, HEADERS)
                    if data:
                        await send(data)
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
        await send(last + writer.ending, more=False)


async def whole_reply(
    call: Call,
    generation: Generation,
    writer: StreamWriter,
    content: Callable[[], dict[str, Any]],
) -> None:
    """Send what the writer has gathered of all deltas, as one JSON answer."""
    async with call.watch_client() as watch:
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                writer.write(delta)
        watch.stop()
        await call.reply_json(content())
