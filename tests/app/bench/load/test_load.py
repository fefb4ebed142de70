"""Loads: equal ones give equal requests, arrivals never wait, and a stall is really one."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import typer

from app.bench.load.client import Job, LoadClient, Trace, open_loop, server_root
from app.bench.load.stall import measure_stall, stall_figures
from app.bench.load.workload import Load, lengths_of
from app.bench.report import MeasurementError
from tests.app.bench.load.traces import trace


def test_equal_loads_give_equal_jobs_in_order_of_arrival() -> None:
    load = Load("sharegpt/8", 5.0, 40.0, num_long=3, long_tokens=3000, seed=4)
    jobs = load.jobs()
    assert jobs == load.jobs()
    assert jobs != Load("sharegpt/8", 5.0, 40.0, num_long=3, long_tokens=3000, seed=5).jobs()
    arrivals = [job.arrival_s for job in jobs]
    assert arrivals == sorted(arrivals)
    assert [job.arrival_s for job in jobs if job.num_prompt_tokens == 3000] == [10.0, 20.0, 30.0]
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1 / 5.0, rel=0.3)


def test_a_load_has_two_requests_at_least() -> None:
    assert [(j.num_prompt_tokens, j.num_output_tokens) for j in Load("7x3", 0.01, 1.0).jobs()] == [
        (7, 3)
    ] * 2


@pytest.mark.parametrize("name", ["chat", "12", "0x5", "sharegpt/no", "sharegpt/0", "x"])
def test_unknown_lengths_are_refused(name: str) -> None:
    with pytest.raises(typer.BadParameter):
        lengths_of(name)


def test_lengths_may_be_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens\n80,16\n")
    prompts, outputs = lengths_of(f"{file}/8")(3, np.random.default_rng(0))
    assert (prompts.tolist(), outputs.tolist()) == ([10] * 3, [2] * 3)
    with pytest.raises(typer.BadParameter, match=r"gone\.csv"):
        lengths_of("gone.csv")


async def test_an_arrival_does_not_wait_for_the_answer_before_it() -> None:
    answered = asyncio.Event()

    async def send(number: int, begin_s: float) -> Trace:
        if number == 0:
            await answered.wait()  # the second request's answer lets the first one end
        else:
            answered.set()
        return trace(0.0, 0.1 + number)

    traces = await asyncio.wait_for(open_loop([Job(0.0, 1, 1)] * 2, send), timeout=30)
    assert [t.event_times_s for t in traces] == [[0.1], [1.1]]


@pytest.mark.parametrize(
    "url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1//"]
)
def test_a_servers_root_is_found_in_its_base_url(url: str) -> None:
    assert server_root(url) == "http://h:1"


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
    found = stall_figures([stalled, smooth, ended, LONG])
    assert found["num_running"] == 2
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
