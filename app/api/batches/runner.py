"""Sends the requests of a batch in the slack of live streams.

Each is sent without an objective and with the lowest priority, and only while the server's quote
(`/v1/slo/quote`) predicts that steps with it take at most half of the tightest TBT objective.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from app.api.batches.lines import Line

QUOTE: Final = "/v1/slo/quote"
NO_OBJECTIVE: Final = {"tbt_ms": 3_600_000.0, "ttft_ms": 3_600_000.0}
LAST: Final = -1000
EXPIRED: Final = "batch_expired"
_BUSY: Final = (429, 503)
_BAD_GATEWAY: Final = (502, 504)  # the server behind a proxy is away, or the request ends it
_NO_ROUTE: Final = (404, 405)
_FIRST_PAUSE_S: Final = 0.4
_LONGEST_PAUSE_S: Final = 5.0
_MAX_BREAKS: Final = 5  # per request, while the server answers others
_QUOTED: Final = ("prompt", "messages", "tools")
_TOKEN_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_DEFAULT_QUOTED_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer. content: JSON on one line."""

    status: int
    content: bytes
    request_id: str = ""
    retry_after: str | None = None


class SendError(Exception):
    """No answer came."""


class NotJsonError(SendError):
    """An answer came, but not in JSON."""


class Server(Protocol):
    async def post(self, url: str, body: bytes) -> Reply:
        """Send JSON; raises SendError."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a line. reply: None if it has none; then code and message say why."""

    custom_id: str
    reply: Reply | None
    code: str | None = None
    message: str | None = None

    @property
    def is_done(self) -> bool:
        return self.reply is not None and self.reply.status == 200

    def line(self) -> bytes:
        """A line of the output, as OpenAI's batches write it."""
        head = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": self.custom_id}
        error = None if self.code is None else {"code": self.code, "message": self.message}
        response = b"null"
        if self.reply is not None:
            about = {"status_code": self.reply.status, "request_id": self.reply.request_id}
            response = _opened(about) + b', "body": ' + self.reply.content + b"}"
        shown = json.dumps(error).encode()
        return b"".join([_opened(head), b', "response": ', response, b', "error": ', shown, b"}\n"])


def _opened(content: Mapping[str, Any]) -> bytes:
    """JSON of an object to which members will be added."""
    return json.dumps(content)[:-1].encode()


@dataclass(slots=True)
class BatchRunner:
    """write: called with each answer. concurrency: most requests of this batch at a time.

    give_up_s: after this time remaining requests fail. gate: held while asking for a quote. places:
    one for each request that is being sent. Batches of one server share both.
    has_quotes: None if not known, which is then found out.
    """

    server: Server
    write: Callable[[Answer], Awaitable[None]]
    concurrency: int = 32
    give_up_s: float = 86_400.0
    has_quotes: bool | None = None
    gate: asyncio.Lock = field(default_factory=asyncio.Lock)
    places: asyncio.Semaphore | None = None
    _begin_s: float = field(default=0.0, init=False)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def run(self, lines: AsyncIterator[Line]) -> None:
        """Answer every line; answers are written in order of completion."""
        self._begin_s = time.monotonic()
        if self.places is None:
            self.places = asyncio.Semaphore(self.concurrency)
        if self.has_quotes is None:
            self.has_quotes = await self._gives_quotes()  # once the server answers
        workers = [asyncio.create_task(self._work(lines)) for _ in range(self.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, lines: AsyncIterator[Line]) -> None:
        while True:
            async with self._reading:
                line = await anext(lines, None)
            if line is None:
                return
            await self.write(await self._answer(line))

    async def _answer(self, line: Line) -> Answer:
        body = dict(line.body)
        if self.has_quotes:
            for key, lowest in (("priority", LAST), ("slo", NO_OBJECTIVE)):
                if body.get(key) is None:  # null is the server's default, as if it were left out
                    body[key] = lowest
        sent, quoted = _written(body), _quoted(line)
        num_breaks = 0
        while not self._is_over():
            pause_s, reply, broken = 0.0, None, None
            try:
                pause_s, reply = await self._send(line.url, sent, quoted)
            except SendError as error:
                broken = Answer(line.custom_id, None, "connection_failed", str(error))
            if reply is not None and reply.status in _BAD_GATEWAY:
                broken = Answer(line.custom_id, reply)
            if broken is not None:
                num_breaks += 1
                if num_breaks == _MAX_BREAKS:
                    return broken
                await asyncio.sleep(_growing_pause_s(num_breaks))
                await self._gives_quotes()  # it may only be away, which is no request's fault
            elif reply is None:
                await asyncio.sleep(pause_s)
            elif reply.status in _BUSY:
                await asyncio.sleep(_pause_s(reply.retry_after))
            else:
                return Answer(line.custom_id, reply)
        message = "This request could not be executed before the completion window expired."
        return Answer(line.custom_id, None, EXPIRED, message)

    async def _send(
        self, url: str, body: bytes, quoted: dict[str, Any]
    ) -> tuple[float, Reply | None]:
        """The answer, or how long to wait for room.

        One worker asks for a quote at a time, because two that are told yes could count the same
        room twice.
        """
        assert self.places is not None
        async with self.places:
            async with self.gate:
                pause_s = await self._pause_before(quoted) if self.has_quotes else 0.0
            return pause_s, None if pause_s else await self.server.post(url, body)

    async def _pause_before(self, quoted: dict[str, Any]) -> float:
        """Time to wait before sending; 0 if the line may be sent now."""
        pause_s = await self._quoted_pause(quoted)
        if pause_s is None:  # never fits the objectives: wait until any request does
            least: dict[str, Any] = {k: quoted[k] for k in ("model", "priority") if k in quoted}
            pause_s = await self._quoted_pause({**least, "prompt_tokens": 1, "max_tokens": 1})
        return pause_s or 0.0

    async def _quoted_pause(self, quoted: dict[str, Any]) -> float | None:
        """Quoted time until there is room; None if waiting does not help.

        Puts the number of tokens in the place of the prompt, which need not be tokenized again.
        """
        try:
            reply = await self.server.post(QUOTE, _written(quoted))
            quote = json.loads(reply.content)
        except SendError:
            return 0.0  # the request itself will report the error
        if _is_away(reply):
            return _pause_s(reply.retry_after)
        if reply.status != 200:
            return 0.0
        for key in _QUOTED:
            quoted.pop(key, None)
        quoted["prompt_tokens"] = quote["prompt_tokens"]
        if quote["can_serve_now"] is not False:
            return 0.0
        if quote["retry_after_s"] is None:
            return None
        return _pause_s(quote["retry_after_s"])

    async def _gives_quotes(self) -> bool:
        """Whether the server gives quotes, asked until it answers or the time is over."""
        num_tries = 0
        while not self._is_over():
            num_tries += 1
            pause_s = _growing_pause_s(num_tries)
            try:
                asked = _written({"prompt_tokens": 1, "max_tokens": 1})
                reply = await self.server.post(QUOTE, asked)
                if not _is_away(reply):
                    return reply.status not in _NO_ROUTE
                pause_s = _pause_s(reply.retry_after)
            except NotJsonError:
                break
            except SendError:
                pass
            await asyncio.sleep(pause_s)
        return True

    def _is_over(self) -> bool:
        return time.monotonic() - self._begin_s >= self.give_up_s


def _is_away(reply: Reply) -> bool:
    """Whether the same question gets an answer later."""
    return reply.status in _BUSY or reply.status in _BAD_GATEWAY


def _quoted(line: Line) -> dict[str, Any]:
    """What to ask a quote for."""
    quoted = {key: line.body[key] for key in _QUOTED if line.body.get(key) is not None}
    prompt = quoted.get("prompt", "")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        quoted = {"prompt_tokens": len(prompt)}
    elif not {"prompt", "messages"} & quoted.keys() or not isinstance(prompt, str):
        quoted = {"prompt_tokens": 1}
    if line.body.get("model") is not None:
        quoted["model"] = line.body["model"]
    quoted["priority"] = LAST
    limits = (line.body.get(key) for key in _TOKEN_LIMITS)
    quoted["max_tokens"] = next((n for n in limits if n is not None), _DEFAULT_QUOTED_TOKENS)
    return quoted


def _written(body: Mapping[str, Any]) -> bytes:
    """JSON in UTF-8, no longer than it was given; half a surrogate pair stays one, for the server
    to refuse."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def _pause_s(retry_after: object) -> float:
    try:
        wanted = float(str(retry_after))
    except ValueError:
        wanted = 1.0
    return min(max(wanted, 0.05), _LONGEST_PAUSE_S)


def _growing_pause_s(num_failures: int) -> float:
    return min(_FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 10), _LONGEST_PAUSE_S)
