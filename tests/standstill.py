"""Processes that stand still, as those of a machine that is suspended: all of them, or one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil


def pass_time(seconds: float) -> None:
    """By the clock: nothing else ends while others stand still."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(0.01)  # polling, bounded


def wait_stopped(pids: Sequence[int]) -> None:
    end_s = time.monotonic() + 30
    while any(psutil.Process(pid).status() != psutil.STATUS_STOPPED for pid in pids):
        assert time.monotonic() < end_s, "they do not stop"
        time.sleep(0.01)  # polling, bounded


def stand_still(pids: Sequence[int], seconds: float) -> None:
    """Returns once the calling process and these have stood still for so long. The caller goes on
    first, since it judges the others."""
    stopped = [os.getpid(), *pids]
    script = f"import tests.standstill as s; s._stop({stopped}, {seconds})"
    other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert other.wait(60 + seconds) == 0


def _stop(pids: Sequence[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_stopped(pids)
        pass_time(seconds)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
