"""A stall is really one: a gap of a running stream while a long prompt is read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from app.bench.load.client import Job, LoadClient, Trace
from app.bench.load.stall import measure_stall, stall_figures
from app.bench.report import MeasurementError
from tests.app.bench.load.traces import trace


class SlowStart:
    """A client whose streams get their first tokens in turn, as behind a slow prefill, and end
    once the long prompt was sent."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._long_sent = asyncio.Event()
        self._num_started = 0
        self.num_started_before_long = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        yield

    async def send(
        self, session: None, job: Job, begin_s: float, on_start: Callable[[Trace], None]
    ) -> Trace:
        sent = Trace(job, sent_s=time.perf_counter() - begin_s)
        on_start(sent)
        if job.num_prompt_tokens == 3000:
            self.num_started_before_long = self._num_started
            self._long_sent.set()
        async with self._turn:
            await asyncio.sleep(0.03)  # a prefill
            sent.event_times_s.append(time.perf_counter() - begin_s)
            self._num_started += 1
        await self._long_sent.wait()
        sent.event_times_s.append(time.perf_counter() - begin_s)
        return sent


def test_the_long_prompt_arrives_once_all_streams_run() -> None:
    client = SlowStart()
    found = measure_stall(cast(LoadClient, client), 8, 3000)
    assert client.num_started_before_long == found["num_running"] == 8


LONG = trace(1.0, 1.5)


def test_a_stall_is_the_longest_gap_of_a_running_stream() -> None:
    stalled, smooth = trace(0.0, 0.5, 1.25, 1.5), trace(0.0, 0.5, 1.0, 1.25)
    ended = trace(0.0, 0.1, 0.9)  # its gap of 0.8 s is no stall: the prompt had not arrived
    late = trace(0.0, 0.1, 0.95, 1.05, 1.1)  # nor is this one: it was over by then
    found = stall_figures([stalled, smooth, ended, late, LONG])
    assert found["num_running"] == 3
    assert found["median_longest_tbt_ms"] == 250.0
    assert found["longest_tbt_ms"] == 750.0
    assert found["ttft_of_long_prompt_ms"] == 500.0


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        ([trace(0.0, error="404: no model 'nope'")] * 2, "404: no model 'nope'"),
        ([trace(0.0, 0.5, 1.5), trace(1.0, error="400: too long")], "400: too long"),
        ([trace(0.0), LONG], "without a token"),
        ([trace(0.0, 0.1, 0.2), LONG], "no stream was running"),
        ([trace(0.0, 1.1, 1.2), LONG], "no stream was running"),
    ],
)
def test_what_is_no_stall_is_no_figure(traces: list[Trace], message: str) -> None:
    with pytest.raises(MeasurementError, match=message):
        stall_figures(traces)
