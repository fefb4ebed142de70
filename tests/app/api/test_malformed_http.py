"""Thousands of malformed bodies: all refused with a 4xx and a reason, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import time
from pathlib import Path

import pytest

from tests import campaign
from tests.app.api.conftest import Server
from tests.app.api.malformed import Bad, bodies

pytestmark = pytest.mark.heavy

PROTOCOLS = ["uvicorn", "own"]
ROOT = Path(__file__).resolve().parents[3]
TICK_S = 0.005
log = logging.getLogger("campaign")  # shown by --log-cli-level=INFO


class LagMeter:
    """How late the running loop was for its ticks, and the CPU time it spent between two.

    On a busy machine the first tells of the machine, the second of this loop's own work.
    """

    def __init__(self) -> None:
        self.longest_late_s = self.longest_work_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._wait()

    def _wait(self) -> None:
        self._work_s = time.thread_time()
        self._due_s = self._loop.time() + TICK_S
        self._handle = self._loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        self.longest_late_s = max(self.longest_late_s, self._loop.time() - self._due_s)
        self.longest_work_s = max(self.longest_work_s, time.thread_time() - self._work_s)
        self._wait()

    def stop(self) -> None:
        self._handle.cancel()


@pytest.mark.timeout(600)
async def test_all_are_refused_and_nothing_leaks(server: Server) -> None:
    count = campaign.size(1000, 10_000)
    num_tasks = len(asyncio.all_tasks())
    gc.collect()
    gc.freeze()  # as a replica does
    lag = LagMeter()
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.app.api.malformed", server.url),
        *("--model", "tiny", "--count", str(count)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await client.communicate()
    lag.stop()
    report = json.loads(output)
    late_ms, work_ms = 1e3 * lag.longest_late_s, 1e3 * lag.longest_work_s
    log.info("loop late at most %.0f ms, own work %.0f ms; %s", late_ms, work_ms, report)
    assert report["not_refused"] == []
    assert report["num_requests"] == count
    assert server.engine.num_running == 0
    assert server.engine.seen == []  # not one reached the engine
    answer = await server.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2}
    )
    assert answer.status_code == 200
    await server.http.aclose()
    assert len(asyncio.all_tasks()) <= num_tasks + 1  # the server's own keep-alive of one


def test_the_same_seed_draws_the_same_bodies() -> None:
    drawn: list[Bad] = list(bodies(7, 300, "tiny"))
    assert drawn == list(bodies(7, 300, "tiny"))
    assert len({bad.kind for bad in drawn}) > 20
