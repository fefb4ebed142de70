"""Sends the requests of a file in the slack of live streams.

Each is sent without an objective and with the lowest priority, and only while the server's quote
(`/v1/slo/quote`) says that one more request fits the deployment's objectives.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

QUOTE: Final = "/v1/slo/quote"
NO_OBJECTIVE: Final = {"tbt_ms": 3_600_000.0, "ttft_ms": 3_600_000.0}
LAST: Final = -1000
_BUSY: Final = (429, 503)
_LONGEST_PAUSE_S: Final = 5.0
_MAX_BREAKS: Final = 5  # broken connections per request
_QUOTED: Final = ("prompt", "messages", "tools", "max_tokens")
_DEFAULT_QUOTED_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(slots=True)
class Totals:
    """Counts of the results."""

    num_done: int = 0
    num_failed: int = 0
    num_completion_tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class BatchRunner:
    """concurrency: most requests at a time. give_up_s: after this time remaining requests fail.

    write: called with each answer's object.
    """

    client: httpx.AsyncClient
    write: Callable[[dict[str, Any]], None]
    concurrency: int = 32
    give_up_s: float = 86_400.0
    totals: Totals = field(default_factory=Totals)
    _is_legato: bool = field(default=False, init=False)
    _begin_s: float = field(default=0.0, init=False)
    _gate: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def run(self, lines: Sequence[Line]) -> Totals:
        """Answer every line; answers are written in order of completion."""
        self._begin_s = time.monotonic()
        self._is_legato = await self._has_quotes()
        left = iter(lines)
        workers = [
            asyncio.create_task(self._work(left)) for _ in range(min(self.concurrency, len(lines)))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        self.totals.seconds = time.monotonic() - self._begin_s
        return self.totals

    async def _work(self, left: Any) -> None:
        for line in left:
            answer = await self._answer(line)
            response = answer["response"]
            if response is not None and response["status_code"] == 200:
                self.totals.num_done += 1
                usage = response["body"].get("usage") or {}
                tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
                self.totals.num_completion_tokens += tokens
            else:
                self.totals.num_failed += 1
            self.write(answer)

    async def _answer(self, line: Line) -> dict[str, Any]:
        body = dict(line.body)
        if self._is_legato:
            body = {"priority": LAST, "slo": NO_OBJECTIVE, **body}
        num_breaks = 0
        while True:
            if not await self._wait_for_slack(line):
                return _result(line, None, "batch_expired", "The batch's time was over.")
            try:
                answer = await self.client.post(line.url, json=body)
                content = answer.json()
            except (httpx.HTTPError, ValueError) as error:
                num_breaks += 1
                if num_breaks == _MAX_BREAKS:
                    return _result(line, None, "connection_failed", repr(error))
                await asyncio.sleep(min(0.2 * 2**num_breaks, _LONGEST_PAUSE_S))
                continue
            if answer.status_code not in _BUSY:
                return _result(line, answer, content=content)
            await asyncio.sleep(_pause_s(answer.headers.get("retry-after")))

    async def _wait_for_slack(self, line: Line) -> bool:
        """Wait until one more request can be served; False when the time is over.

        One worker asks at a time, because two answers of yes could count the same room twice.
        """
        while time.monotonic() - self._begin_s < self.give_up_s:
            async with self._gate:
                pause_s = await self._pause_before(line) if self._is_legato else 0.0
            if not pause_s:
                return True
            await asyncio.sleep(pause_s)
        return False

    async def _pause_before(self, line: Line) -> float:
        """Time to wait before sending; 0 if the line may be sent now."""
        quoted = {key: line.body[key] for key in _QUOTED if line.body.get(key) is not None}
        if not {"prompt", "messages"} & quoted.keys() or not isinstance(
            quoted.get("prompt", ""), str
        ):
            quoted = {"prompt_tokens": 1}
        quoted.setdefault("max_tokens", _DEFAULT_QUOTED_TOKENS)
        pause_s = await self._quoted_pause(quoted)
        if pause_s is None:  # never fits the objectives: wait until any request does
            pause_s = await self._quoted_pause({"prompt_tokens": 1, "max_tokens": 1})
        return pause_s or 0.0

    async def _quoted_pause(self, quoted: Mapping[str, Any]) -> float | None:
        """Quoted time until there is room; None if waiting does not help."""
        try:
            answer = await self.client.post(QUOTE, json=quoted)
            quote = answer.json()
        except (httpx.HTTPError, ValueError):
            return 0.0  # the request itself will report the error
        if answer.status_code in _BUSY:
            return _pause_s(answer.headers.get("retry-after"))
        if answer.status_code != 200 or quote["can_serve_now"] is not False:
            return 0.0
        if quote["retry_after_s"] is None:
            return None
        return _pause_s(quote["retry_after_s"])

    async def _has_quotes(self) -> bool:
        """Whether the server gives quotes; otherwise requests are sent without them."""
        try:
            answer = await self.client.post(QUOTE, json={"prompt_tokens": 1, "max_tokens": 1})
        except httpx.HTTPError:
            return False
        return answer.status_code != 404 and answer.status_code != 405


def _pause_s(retry_after: object) -> float:
    try:
        wanted = float(str(retry_after))
    except ValueError:
        wanted = 1.0
    return min(max(wanted, 0.05), _LONGEST_PAUSE_S)


def _result(
    line: Line,
    answer: httpx.Response | None,
    code: str | None = None,
    message: str | None = None,
    content: Any = None,
) -> dict[str, Any]:
    """A line of the output, as OpenAI's batches write it."""
    response = None
    if answer is not None:
        response = {
            "status_code": answer.status_code,
            "request_id": answer.headers.get("x-request-id", ""),
            "body": content,
        }
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": response,
        "error": None if code is None else {"code": code, "message": message},
    }
