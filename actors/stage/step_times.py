"""Measures a step by the device's clock, if the stage's activations are sent to another GPU.

The host of such a stage continues as soon as the work is queued, so by its clock the step takes
almost no time, and the next stage's step includes it. So device events mark the beginning and end.
Those of an earlier stage are known only after its activations were sent; they go to the scheduler
by a separate socket, and arrive before the last stage, which computes after them, has answered.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Any

import torch

from actors.transport.messages import STAGE_TIMES
from actors.transport.wire import ConnectionLost, Sender


def new_event() -> Any:
    """An event for which waiting sleeps instead of spinning."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


def interval(begin: Any, end: Any) -> tuple[float, float]:
    """(start, end) on the host's monotonic clock; waits for the end."""
    end.synchronize()
    end_s = time.monotonic()
    return end_s - begin.elapsed_time(end) / 1000, end_s


class StepTimes:
    """The step times of one stage. Device work of a step is queued between `begin` and `end`."""

    def __init__(self, stage: int, sender: Sender | None) -> None:
        """sender: where an earlier stage reports; None in the last, which has read its tokens by
        the end of a step."""
        self._stage = stage
        self._sender = sender
        self._ended: queue.SimpleQueue[tuple[int, Any, Any]] = queue.SimpleQueue()
        if sender is not None:
            threading.Thread(target=self._report, args=(sender,), daemon=True).start()

    def begin(self) -> Any:
        """Queue the begin event, after the arrival of the step's activations."""
        event = new_event()
        event.record()
        return event

    def end(self, ticket: int, begin: Any) -> tuple[float, float] | None:
        """The last stage's interval; None in an earlier one, whose interval is sent when it is
        over."""
        event = new_event()
        event.record()
        if self._sender is None:
            return interval(begin, event)
        self._ended.put((ticket, begin, event))
        return None

    def _report(self, sender: Sender) -> None:
        # A device that failed fails the step too, which says so.
        with contextlib.suppress(ConnectionLost, RuntimeError):
            while True:
                ticket, begin, end = self._ended.get()
                sender.send(STAGE_TIMES.pack(ticket, self._stage, *interval(begin, end)))
