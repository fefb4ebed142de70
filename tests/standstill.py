"""Processes that stand still, as all of a machine do that is suspended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

_AHEAD_S = 0.5


def stand_still(judges: Sequence[int], judged: Sequence[int], seconds: float) -> None:
    """Stop these processes for so long, and then the judged ones for a moment longer: their judges
    look at them before anything can come from them."""
    pids = [*judges, *judged]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        end_s = time.monotonic() + 30
        while any(psutil.Process(pid).status() != psutil.STATUS_STOPPED for pid in pids):
            assert time.monotonic() < end_s, "they do not stop"
            time.sleep(0.01)  # polling, bounded
        pass_time(seconds)
        for pid in judges:
            os.kill(pid, signal.SIGCONT)
        pass_time(_AHEAD_S if judged else 0.0)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # one that was killed: the others go on
                os.kill(pid, signal.SIGCONT)


def pass_time(seconds: float) -> None:
    """By this process's clock: while others stand still, it alone tells the time."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(0.01)  # polling, bounded
