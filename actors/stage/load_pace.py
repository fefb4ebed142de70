"""When a thread may load adapters beside the steps: for as long as their plans allow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

IDLE_S = 0.02  # without a step from which the stage is idle; busy stages wait less for their next


class LoadPace:
    """Steps call `step`, and a thread that loads calls `pause` between its pieces.

    A load's time is that by the clock, the upper bound of what it takes from a step on any device.
    A piece that ends too late shortens the time beside the next step. An idle stage loads freely.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._left_s = 0.0  # beside the newest step; negative: taken too much
        self._runs = False  # whether a step does
        self._step_s = -IDLE_S  # when the newest one began; the end is when it is not running
        self._ended_s = -IDLE_S
        self._piece_s = 0.0  # when the piece under way began

    @contextmanager
    def step(self, load_s: float) -> Iterator[None]:
        """Around a step. load_s: as in `StepPlan`."""
        with self._changed:
            self._left_s = load_s + min(0.0, self._left_s)
            self._runs, self._step_s = True, self._clock()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._runs, self._ended_s = False, self._clock()
                self._changed.notify_all()

    def begin(self) -> None:
        """Wait until a first piece may begin."""
        with self._changed:
            self._wait()

    def pause(self) -> None:
        """A piece has ended: wait until the next one may begin."""
        with self._changed:
            if not self._is_idle():
                self._left_s -= self._clock() - max(self._piece_s, self._step_s)
            self._wait()

    def _is_idle(self) -> bool:
        return not self._runs and self._clock() - self._ended_s >= IDLE_S

    def _wait(self) -> None:
        while self._left_s <= 0.0 and not self._is_idle():
            left_s = IDLE_S - (self._clock() - self._ended_s)
            self._changed.wait(None if self._runs else left_s)
        self._piece_s = self._clock()
