"""An open-loop load client for any OpenAI-compatible server: arrivals never wait for answers.

It records the arrival of every streamed event, so time to first token, time between tokens and
stalls are measured as a caller sees them. Prompts are token ids of exact lengths.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from actors.transport.gc_utils import freeze_gc_heap
from actors.transport.time_slices import shorten_time_slices
from app.bench.report import MeasurementError

if TYPE_CHECKING:
    import aiohttp


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its arrival in seconds since the start of the run, its lengths in tokens."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class Trace:
    """One request as its caller saw it; times in seconds since the start of the run.

    tokens: of an engine in this process; a server says only how many there are. refused_s: when an
    error came in the place of an answer. has_ended: the stream said so.
    """

    job: Job
    sent_s: float = 0.0
    event_times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None
    tokens: list[int] = field(default_factory=list)
    refused_s: float | None = None
    has_ended: bool = False

    @property
    def ttft_s(self) -> float | None:
        return self.event_times_s[0] - self.job.arrival_s if self.event_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive events (TBT); the first token has none."""
        times = self.event_times_s
        return [b - a for a, b in itertools.pairwise(times)]

    @property
    def finished(self) -> bool:
        return self.error is None and self.num_tokens >= self.job.num_output_tokens

    @property
    def problem(self) -> str | None:
        """Why it has not finished."""
        if self.finished or self.error is not None:
            return self.error
        if not self.has_ended:
            return f"the stream broke off after {len(self.event_times_s)} events"
        tokens = f"{self.num_tokens} of {self.job.num_output_tokens} tokens"
        return f"{tokens}: does the server honor ignore_eos and include_usage?"


async def open_loop(
    jobs: Sequence[Job],
    send: Callable[[int, float], Coroutine[Any, Any, Trace]],
    until: asyncio.Event | None = None,
) -> list[Trace]:
    """Send every job at its time, independent of earlier ones; wait for all answers.

    send: takes a job's number and the start of the run on `time.perf_counter`.
    until: once it is set, no further job is sent.
    """
    begin_s = time.perf_counter()
    until = until or asyncio.Event()
    tasks = []
    for number, job in enumerate(jobs):
        delay_s = job.arrival_s - (time.perf_counter() - begin_s)
        if delay_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), delay_s)
        if until.is_set():
            break
        tasks.append(asyncio.create_task(send(number, begin_s)))
    return list(await asyncio.gather(*tasks))


def server_root(url: str) -> str:
    """The server's root, also from a base URL for OpenAI's clients.

    >>> server_root("http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000'
    """
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that a server with API keys asks for."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def ask(url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """GET on the load's own way, which no proxy of the environment is on: httpx would need an extra
    package for a SOCKS proxy even where it is not to be asked."""
    trusted = ssl.create_default_context()
    return httpx.get(url, timeout=timeout_s, headers=headers, trust_env=False, verify=trusted)


def first_model(url: str, api_key: str | None = None) -> str:
    """The first model that the server lists. Raises MeasurementError if it lists none."""
    try:
        headers = authorization(api_key)
        data = ask(f"{server_root(url)}/v1/models", 10, headers).json()
        return str(data["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, KeyError, IndexError, TypeError, ValueError) as why:
        raise MeasurementError(f"no list of models at {server_root(url)}/v1/models: {why}") from why


class LoadClient:
    """url: the server's root, or its base URL that ends in /v1.

    vocab: prompts draw their ids from [first_token, vocab).
    extra: further fields of every request's body.
    seed None: new prompts in every process, which no server has cached.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        vocab: int = 4000,
        first_token: int = 300,
        timeout_s: float = 600.0,
        seed: int | None = None,
        extra: Mapping[str, Any] | None = None,
        api_key: str | None = None,
    ) -> None:
        self.headers = {"content-type": "application/json", **authorization(api_key)}
        self._extra = dict(extra or {})
        self.root = server_root(url)
        self._endpoint = self.root + "/v1/completions"
        self._model = model
        self._tokens = range(first_token, vocab)
        self._timeout_s = timeout_s
        self._chance = random.Random(seed)

    def body(self, job: Job) -> bytes:
        """A request with a new prompt, so that a second run is not served from the prefix cache."""
        chance = self._chance
        return json.dumps(
            {
                "model": self._model,
                "prompt": chance.choices(self._tokens, k=job.num_prompt_tokens),
                "max_tokens": job.num_output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._extra,
            }
        ).encode()

    async def run(
        self,
        jobs: Sequence[Job],
        on_done: Callable[[Trace], None] | None = None,
        on_start: Callable[[Trace], None] | None = None,
        until: asyncio.Event | None = None,
    ) -> list[Trace]:
        """Run the jobs in open loop. on_start, on_done: called with each trace when its request is
        sent and when its answer ends. until: ends the arrivals."""
        bodies = [self.body(job) for job in jobs]
        async with self.session() as session:
            return await open_loop(
                jobs,
                lambda n, begin_s: self._one(
                    session, jobs[n], bodies[n], begin_s, on_done, on_start
                ),
                until,
            )

    def session(self) -> aiohttp.ClientSession:
        """A session without connection limit; the caller closes it.

        Shortens this process's time slices, and freezes its heap: the client's own wait for a core
        that a server of the same machine computes on, or for a full collection, is no gap of the
        server's."""
        import aiohttp  # here, because `legato --help` imports this module

        shorten_time_slices()
        freeze_gc_heap()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        return aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def send(
        self,
        session: aiohttp.ClientSession,
        job: Job,
        begin_s: float,
        on_start: Callable[[Trace], None] | None = None,
        body: bytes | None = None,
    ) -> Trace:
        """Send one request now. begin_s: the start of the run on `time.perf_counter`. body: of
        `body`; a new one if None."""
        body = self.body(job) if body is None else body
        return await self._one(session, job, body, begin_s, None, on_start)

    async def _one(
        self,
        session: aiohttp.ClientSession,
        job: Job,
        body: bytes,
        begin_s: float,
        on_done: Callable[[Trace], None] | None,
        on_start: Callable[[Trace], None] | None = None,
    ) -> Trace:
        import aiohttp

        trace = Trace(job, sent_s=time.perf_counter() - begin_s)
        if on_start is not None:
            on_start(trace)
        try:
            async with session.post(self._endpoint, data=body, headers=self.headers) as response:
                if response.status != 200:
                    trace.refused_s = time.perf_counter() - begin_s
                    trace.error = f"{response.status}: {error_message(await response.text())}"
                else:
                    await _read_events(response, trace, begin_s)
        except (aiohttp.ClientError, TimeoutError) as error:
            trace.error = f"{type(error).__name__}: {error}"
        if on_done is not None:
            on_done(trace)
        return trace


def error_message(body: str) -> str:
    """The message of an error body, taken out of OpenAI's JSON if it has that form.

    >>> error_message('{"error": {"message": "No such model."}}')
    'No such model.'
    """
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200]


async def sse_events(
    response: aiohttp.ClientResponse,
) -> AsyncGenerator[tuple[float, list[bytes]], None]:
    """Events that arrived together, and their time on `time.perf_counter`, without blank lines."""
    rest = b""
    async for data in response.content.iter_any():
        now_s = time.perf_counter()
        # A line may end with CRLF, whose halves may come apart.
        *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        yield now_s, events


async def _read_events(response: aiohttp.ClientResponse, trace: Trace, begin_s: float) -> None:
    async for at_s, events in sse_events(response):
        for event in events:
            trace.has_ended |= event == b"data: [DONE]"
            if b'"usage":{' in event or b'"usage": {' in event:
                usage = json.loads(event.removeprefix(b"data: ")).get("usage") or {}
                trace.num_tokens = usage.get("completion_tokens", trace.num_tokens)
                if b'"choices":[]' in event or b'"choices": []' in event:
                    continue
            if event.startswith(b"data: {"):
                if b'"error"' in event[:20]:
                    trace.error = event.decode(errors="replace")[:300]
                else:  # an event without text counts, as its token may be part of a character
                    trace.event_times_s.append(at_s - begin_s)
