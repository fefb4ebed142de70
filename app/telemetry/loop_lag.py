"""Delay of this process's event loop.

Work in the loop delays all of a replica's streams. A periodic tick measures the delay. Waits of the
loop's thread for a core, caused by other processes, are subtracted by the kernel's own count.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from app.telemetry.prometheus import QuickHistogram

TICK_S: Final = 0.02  # shorter pauses may be missed
_BOUNDS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
_SCHEDULED: Final = "/proc/thread-self/schedstat"


class LoopLag:
    """Call `start` on the watched loop; `registry` holds the metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lag = QuickHistogram(
            "legato_event_loop_lag_seconds",
            "Delay of the replica's event loop, without its waits for a core",
            {},
            _BOUNDS_S,
            self.registry,
        )
        self._run_delay = Counter(
            "legato_event_loop_run_delay_seconds",
            "Waits of the event loop's thread for a core",
            registry=self.registry,
        )
        self._timer: asyncio.TimerHandle | None = None
        self._file: int | None = None
        self._due_s = 0.0
        self._delayed_s = 0.0

    def start(self) -> None:
        """Start ticking on the running loop."""
        with suppress(OSError):  # not Linux: all lag counts as the loop's
            self._file = os.open(_SCHEDULED, os.O_RDONLY | os.O_CLOEXEC)
        self._delayed_s = self._waited_for_core_s()
        self._wait(asyncio.get_running_loop())

    def close(self) -> None:
        """Stop ticking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = time.perf_counter() + TICK_S
        self._timer = loop.call_later(TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        delayed_s = self._waited_for_core_s()
        self.note(time.perf_counter() - self._due_s, delayed_s - self._delayed_s)
        self._delayed_s = delayed_s
        self._wait(loop)

    def note(self, late_s: float, delay_s: float) -> None:
        """Record a tick. delay_s: the thread's wait for a core since the last tick."""
        self._lag.observe_all((max(0.0, late_s - delay_s),))
        self._run_delay.inc(delay_s)

    def _waited_for_core_s(self) -> float:
        """Total time that this thread has waited for a core."""
        if self._file is None:
            return 0.0
        return int(os.pread(self._file, 100, 0).split()[1]) / 1e9
