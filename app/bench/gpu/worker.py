"""A process that runs one section after another, and is replaced when a section ruins it.

After an illegal memory access, every later call of a CUDA context fails; a device-side assertion or
a segmentation fault ends the process; a kernel may never end. What was asked next then runs in a
fresh process, and what had been found is kept by the one that asks.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from app.bench.report import MeasurementError

Add = Callable[[str, Any], None]  # (section, row)
Work = Callable[[Add], dict[str, Any] | None]  # can be pickled; returns what it found beside rows

# Without a row for so long, a section is taken for one that never ends.
_SILENT_S = 600.0
_ENDS_WITHIN_S = 10.0


def cuda_answers() -> bool:
    """Whether this process can still compute on its GPU, if it has one."""
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


class Worker:
    """is_sound: asked in the process after an error; can be pickled. silent_s: see above."""

    def __init__(
        self, is_sound: Callable[[], bool] = cuda_answers, silent_s: float = _SILENT_S
    ) -> None:
        self._is_sound = is_sound
        self._silent_s = silent_s
        self._running: tuple[SpawnProcess, Connection] | None = None

    def run(self, add: Add, work: Work) -> dict[str, Any]:
        """What `work` found beside the rows that it added.

        Raises MeasurementError: what it raised, or how its process ended.
        """
        process, connection = self._running = self._running or self._start()
        try:
            connection.send(work)
            while connection.poll(self._silent_s):
                match connection.recv():
                    case "row", section, row:
                        add(section, row)
                    case "found", found:
                        return dict(found or {})
                    case "raised", text, is_sound:
                        if not is_sound:
                            self.close()
                        raise MeasurementError(text)
        except (EOFError, ConnectionError):
            process.join(_ENDS_WITHIN_S)
            how = _how_it_ended(process.exitcode)
            self.close()
            raise MeasurementError(f"its process {how}") from None
        self.close()
        raise MeasurementError(f"no word for {self._silent_s:.0f} s: ended")

    def close(self) -> None:
        """End the process, whatever it does; the next `run` starts another."""
        if self._running is not None:
            process, connection = self._running
            connection.close()
            process.kill()
            process.join()
        self._running = None

    def _start(self) -> tuple[SpawnProcess, Connection]:
        context = multiprocessing.get_context("spawn")  # a fork would share the GPU's state
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._is_sound))
        process.start()
        theirs.close()
        return process, ours


def _serve(connection: Connection, is_sound: Callable[[], bool]) -> None:
    def add(section: str, row: Any) -> None:
        connection.send(("row", section, row))

    while True:
        try:
            work: Work = connection.recv()
        except EOFError:  # the one that asked is gone
            return
        try:
            found = work(add)
        except Exception as error:  # of any kind, by a kernel's first run
            connection.send(("raised", f"{type(error).__name__}: {error}", is_sound()))
        else:
            connection.send(("found", found))


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its pipe"
    if exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"ended with status {exitcode}"
