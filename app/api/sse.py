"""Server-sent events and whole replies.

A plain token is JSON-escaped, placed between two texts prepared once per request, and written
directly to the connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from json.encoder import encode_basestring_ascii
from typing import Any, ClassVar, Final

from app.api.generation import Generation, timing_of
from app.api.http.call import Call, ClientGone
from app.api.http.connections import BodyWriter
from app.api.http.errors import ApiError, from_engine
from app.api.schema.common import StreamOptions
from app.engine_client.client import EngineError
from app.text.incremental import TextDelta, TextStream

_log = logging.getLogger("legato.api")

HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies must not buffer tokens
}
DONE: Final = b"data: [DONE]\n\n"

# ASCII only: some clients treat U+2028 and similar characters as line ends.
json_string: Callable[[str], str] = encode_basestring_ascii


def event(content: Any) -> bytes:
    """One `data:` event."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    """A named event, as /v1/responses streams them."""
    return f"event: {name}\n".encode() + event(content)


class StreamWriter(ABC):
    """Turns a generation's deltas into one endpoint's events.

    templates: per continuation, the texts before and after the JSON string of a text-only event;
    None while an event needs more than its text. ending: sent after the last event. keep_alive:
    sent where there is nothing to send.
    """

    ending: ClassVar[bytes] = DONE
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"  # a comment, which every reader passes over

    def __init__(self, num_continuations: int) -> None:
        self.templates: list[tuple[str, str] | None] = [None] * num_continuations

    async def prepare(self, delta: TextDelta) -> None:
        """Work that `write` needs and that would block the event loop for too long."""
        return

    @abstractmethod
    def write(self, delta: TextDelta) -> bytes:
        """The events of one delta."""

    def write_text(self, index: int, text: str) -> bytes:
        """A text-only event, from its continuation's template."""
        template = self.templates[index]
        if template is None:
            return self.write(TextDelta(index, text, 0))
        return f"{template[0]}{json_string(text)}{template[1]}".encode()

    @abstractmethod
    def closing(self) -> bytes:
        """The last events before [DONE]."""

    def failing(self, error: ApiError) -> bytes:
        """The last events of a failed stream."""
        return b"data: " + error.body() + b"\n\n"


class ChoiceWriter(StreamWriter):
    """OpenAI's envelope: each event repeats the answer's head and carries one choice."""

    def __init__(
        self,
        generation: Generation,
        answer_id: str,
        kind: str,
        model: str,
        options: StreamOptions | None,
    ) -> None:
        super().__init__(len(generation.streams))
        self._generation = generation
        self._options = options or StreamOptions()
        self._head: dict[str, Any] = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        # With include_usage every event but the last has a usage of null, or of what came so far.
        self._null = {"usage": None} if self._options.include_usage else {}
        self._counts_each = self._options.continuous_usage_stats
        opening = event({**self._head, **self._null})
        self._opening = opening[:-3].decode()  # without closing brace and blank line

    def template(self, index: int, before: str, after: str) -> tuple[str, str] | None:
        """Template of a text-only event, with `before` and `after` around the choice's string;
        None where each event has its own usage."""
        if self._counts_each:
            return None
        return f'{self._opening},"choices":[{{"index":{index},{before}', f"{after}}}]}}\n\n"

    def _chunk(self) -> dict[str, Any]:
        """An event without its choices."""
        return {**self._head, **({"usage": self._usage()} if self._counts_each else self._null)}

    def choice_event(self, choice: dict[str, Any]) -> bytes:
        return event({**self._chunk(), "choices": [choice]})

    def closing(self) -> bytes:
        """Usage and timing, if requested."""
        fields: dict[str, Any] = {}
        if self._options.include_usage:
            fields["usage"] = self._usage()
        if self._options.include_timing:
            fields["timing"] = timing_of(self._generation)
        return event({**self._head, "choices": [], **fields}) if fields else b""

    @abstractmethod
    def _usage(self) -> dict[str, object]: ...


class EventSink:
    """Writes one generation's plain tokens to its connection.

    Implements `app.engine_client.client.TokenSink`.
    """

    __slots__ = (
        "_body", "_clock", "_deliveries", "_is_open", "_keep_alive", "_streams", "_templates",
        "_writer",
    )  # fmt: skip

    def __init__(
        self,
        body: BodyWriter,
        writer: StreamWriter,
        generation: Generation,
        keep_alive: KeepAlive,
    ) -> None:
        self._body = body
        self._is_open = body.is_open
        self._writer = writer
        self._keep_alive = keep_alive
        self._templates = writer.templates
        self._streams: Sequence[TextStream] = generation.streams
        self._deliveries = generation.deliveries.tokens
        self._clock = asyncio.get_running_loop().time

    def write(self, index: int, tokens: Sequence[int]) -> bool:
        """Write tokens without waking a task; False if the reader must process them."""
        stream, num_tokens = self._streams[index], len(tokens)
        if not (stream.is_plain and self._is_open()):
            return False
        self._deliveries.append((self._clock(), num_tokens, index, 1))
        stream.num_tokens += num_tokens
        template = self._templates[index]
        if template is not None:
            text = json_string(stream.push(tokens))
            self._body.write(f"{template[0]}{text}{template[1]}".encode())
            self._keep_alive.has_sent = True
        elif events := self._writer.write(stream.plain(tokens)):
            self._body.write(events)
            self._keep_alive.has_sent = True
        return True


class KeepAlive:
    """Sends `comment` where a stream has sent nothing for a period, at the latest after two.

    Proxies and clients end a silent connection, often after 60 s: the prefill would be lost, and
    the client's next attempt be queued from the start. has_sent: set by whoever sends.
    """

    __slots__ = ("_call", "_comment", "_sleep", "_task", "has_sent")

    def __init__(
        self,
        call: Call,
        comment: bytes,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._call = call
        self._comment = comment
        self._sleep = sleep
        self.has_sent = False
        watch = self._watch(call.options.keep_alive_s)
        self._task: asyncio.Task[None] | None = asyncio.create_task(watch)

    async def _watch(self, period_s: float) -> None:
        while True:
            self.has_sent = False
            await self._sleep(period_s)
            if not self.has_sent:
                if not self._call.started:
                    await self._call.start(200, HEADERS)
                await self._call.send(self._comment)

    def stop(self) -> None:
        """Send nothing more."""
        task, self._task = self._task, None  # it refers to this
        if task is not None:
            task.cancel()


async def stream_reply(call: Call, generation: Generation, writer: StreamWriter) -> None:
    """Send every delta as it arrives.

    The HTTP head is sent with the first delta, so an earlier refusal has an HTTP status, unless the
    stream had to be kept alive. A later failure is sent as an error event, so a stream never ends
    without notice.
    """
    send = call.send
    body = call.body_writer
    keep_alive = KeepAlive(call, writer.keep_alive)
    sink = None if body is None else EventSink(body, writer, generation, keep_alive)
    async with call.watch_client() as watch:
        try:
            async with aclosing(generation.deltas(sink)) as deltas:
                async for delta in deltas:
                    await writer.prepare(delta)
                    data = writer.write(delta)
                    if not call.started:
                        await call.start(200, HEADERS)
                    if data:
                        keep_alive.has_sent = True
                        await send(data)
            last = writer.closing()
        except ClientGone:
            raise
        except Exception as error:  # any failure must be reported in the stream
            if not call.started:
                raise
            failure = error if isinstance(error, ApiError) else from_engine(error)
            if not isinstance(error, ApiError | EngineError):
                _log.exception("request %s failed", call.request_id)
            if not generation.num_completion_tokens:
                call.give_back(failure)
            last = writer.failing(failure)
        finally:
            keep_alive.stop()
        watch.stop()
        await send(last + writer.ending, more=False)


async def whole_reply(
    call: Call,
    generation: Generation,
    writer: StreamWriter,
    content: Callable[[], dict[str, Any]],
) -> None:
    """Collect all deltas in the writer, and send `content` as one JSON reply."""
    async with call.watch_client() as watch:
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                writer.write(delta)
        watch.stop()
        await call.reply_json(content())
