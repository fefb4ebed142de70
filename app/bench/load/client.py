"""An open-loop load client for any OpenAI-compatible server: arrivals never wait for answers.

It records when each streamed event of each request arrived, so that time to first token, time
between tokens and stalls are those a caller sees. Requests use token-id prompts of exact lengths.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from app.simulate.workload.requests import Workload


@dataclass(frozen=True, slots=True)
class Job:
    """One request: arrival relative to the start of the run, lengths in tokens."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class Trace:
    """What a caller saw of one request; times are seconds since the start of the run."""

    job: Job
    sent_s: float = 0.0
    event_times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.event_times_s[0] - self.job.arrival_s if self.event_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Time between consecutive events: TBT, as the first token has none."""
        times = self.event_times_s
        return [b - a for a, b in itertools.pairwise(times)]

    @property
    def finished(self) -> bool:
        return self.error is None and self.num_tokens >= self.job.num_output_tokens


def jobs_of(workload: Workload) -> list[Job]:
    return [
        Job(float(a), int(p), int(o))
        for a, p, o in zip(
            workload.arrival_s, workload.prompt_tokens, workload.output_tokens, strict=True
        )
    ]


class LoadClient:
    """url: the server's root. vocab: prompts draw their ids from [first_token, vocab).

    extra: further fields of every request's body.
    seed None: other prompts in every process, so that no server has seen them.
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
    ) -> None:
        self._extra = dict(extra or {})
        self._endpoint = url.rstrip("/") + "/v1/completions"
        self._model = model
        self._tokens = range(first_token, vocab)
        self._timeout_s = timeout_s
        self._chance = random.Random(seed)

    def _body(self, job: Job) -> bytes:
        # Every prompt is new, or a second run would be served from the prefix cache.
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
        self, jobs: Sequence[Job], on_done: Callable[[Trace], None] | None = None
    ) -> list[Trace]:
        """Send every job at its time, whatever the earlier ones do; wait for all answers."""
        bodies = [self._body(job) for job in jobs]
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            begin_s = time.perf_counter()
            tasks = []
            for job, body in zip(jobs, bodies, strict=True):
                delay_s = job.arrival_s - (time.perf_counter() - begin_s)
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                tasks.append(asyncio.create_task(self._one(session, job, body, begin_s, on_done)))
            return list(await asyncio.gather(*tasks))

    async def _one(
        self,
        session: aiohttp.ClientSession,
        job: Job,
        body: bytes,
        begin_s: float,
        on_done: Callable[[Trace], None] | None,
    ) -> Trace:
        trace = Trace(job, sent_s=time.perf_counter() - begin_s)
        headers = {"content-type": "application/json"}
        try:
            async with session.post(self._endpoint, data=body, headers=headers) as response:
                if response.status != 200:
                    trace.error = f"{response.status}: {(await response.text())[:200]}"
                else:
                    await _read_events(response, trace, begin_s)
        except (aiohttp.ClientError, TimeoutError) as error:
            trace.error = f"{type(error).__name__}: {error}"
        if on_done is not None:
            on_done(trace)
        return trace


async def _read_events(response: aiohttp.ClientResponse, trace: Trace, begin_s: float) -> None:
    rest = b""
    async for data in response.content.iter_any():
        now_s = time.perf_counter() - begin_s
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if b'"usage":{' in event or b'"usage": {' in event:
                usage = json.loads(event.removeprefix(b"data: ")).get("usage") or {}
                trace.num_tokens = usage.get("completion_tokens", trace.num_tokens)
                if b'"choices":[]' in event or b'"choices": []' in event:
                    continue
            if event.startswith(b"data: {"):
                if b'"error"' in event[:20]:
                    trace.error = event.decode(errors="replace")[:300]
                else:  # an event without text counts: its token may be half a character
                    trace.event_times_s.append(now_s)
