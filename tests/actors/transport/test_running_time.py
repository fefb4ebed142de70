"""Time that counts for a deadline, in a process that is stopped for real."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time

import pytest

from actors.transport.running_time import LOOKS, RunningTime, running_timeout
from tests.standstill import pass_time, stand_still

LIMIT_S = 1.0
# Waits for a line, as for a peer's answer, within the limit.
_JUDGE = f"""
import asyncio
from actors.transport.running_time import running_timeout

async def judge():
    answered = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, answered.set)
    try:
        async with running_timeout({LIMIT_S}):
            print("waits", flush=True)
            await answered.wait()
    except TimeoutError:
        print("dead", flush=True)
    else:
        print("answered", flush=True)

asyncio.run(judge())
"""


@pytest.mark.parametrize("answers", [True, False])
def test_a_stopped_judge_does_not_blame_its_peer(answers: bool) -> None:
    """Once it runs again it waits for what is left, and no longer."""
    command = [sys.executable, "-c", _JUDGE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as judge:
        assert judge.stdin is not None
        assert judge.stdout is not None
        assert judge.stdout.readline() == b"waits\n"
        stand_still([judge.pid], [], 1.5 * LIMIT_S)
        if answers:
            pass_time(LIMIT_S / 4)  # in which the judge runs, and its peer has not answered
            judge.stdin.write(b"answer\n")
        assert judge.stdout.readline() == (b"answered\n" if answers else b"dead\n")


async def test_a_peer_is_dead_after_the_limit() -> None:
    begin_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with running_timeout(0.2):
            await asyncio.Event().wait()
    assert time.monotonic() - begin_s >= 0.2


async def test_what_ends_in_time_leaves_no_timer() -> None:
    async with running_timeout(0.01):
        pass
    async with asyncio.timeout(10):
        async with running_timeout(0.05):
            asyncio.get_running_loop().call_later(0.02, (done := asyncio.Event()).set)
            await done.wait()


@pytest.mark.parametrize("late_s", [0.0, 0.5, 1.0])
def test_looks_that_are_late_by_up_to_a_period_count_all_time(late_s: float) -> None:
    ran, now_s, period_s = RunningTime(), 100.0, 1.0
    for _ in range(20):
        now_s += period_s + late_s
        assert math.isclose(ran.since(100.0, now_s, period_s), now_s - 100.0)


def test_a_wait_with_another_begin_counts_from_there() -> None:
    ran = RunningTime()
    assert ran.since(100.0, 101.0, 1.0) == 1.0
    assert ran.since(101.0, 102.0, 1.0) == 1.0  # answered as it was looked
    assert ran.since(101.5, 103.0, 1.0) == 1.5
    assert ran.since(101.5, 1000.0, 1.0) == 1.5 + 2.0


def test_a_limit_has_passed_after_so_many_looks_however_late() -> None:
    ran = RunningTime()
    counted = [ran.since(0.0, 1e6 * look, LIMIT_S / LOOKS) for look in range(1, LOOKS // 2 + 1)]
    assert counted[-2] < LIMIT_S <= counted[-1]
