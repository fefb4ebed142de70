"""The compute threads where there are more of them than cores, so that some lose theirs."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from kernels.cpu import library
from tests.kernels.cpu.batches import threads

pytestmark = pytest.mark.skipif(library.load() is None, reason="the C++ library was not built")


def run_jobs(num_tasks: int, num_jobs: int) -> None:
    loaded = library.load()
    assert loaded is not None
    loaded.legato_run_empty(ctypes.c_int64(num_tasks), ctypes.c_int64(num_jobs))


@pytest.mark.timeout(60)
def test_no_job_waits_for_ever_with_more_threads_than_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    for count in (cores, cores + 1, 3 * cores):
        with threads(count):
            run_jobs(num_tasks=3 * count, num_jobs=500)


@pytest.mark.timeout(60)
def test_every_thread_may_still_run_on_every_core() -> None:
    """A worker that leaves its caller's core is not kept from it: one that lost its time on a core
    between its two calls is soon back."""
    allowed = os.sched_getaffinity(0)
    tasks = Path("/proc/self/task")
    with threads(2 * len(allowed) + 1):
        run_jobs(num_tasks=64, num_jobs=500)
        while any(os.sched_getaffinity(int(task.name)) != allowed for task in tasks.iterdir()):
            os.sched_yield()  # without end only where a worker is kept away: the time limit ends it
