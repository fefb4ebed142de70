"""Runs work that may never end in a process of its own, which can be killed.

A thread cannot be stopped from outside; a chat template or a grammar that loops would hold one
for ever, and with it the interpreter lock. The child reads one JSON line per job and answers with
one; it dies with its parent, at the end of its input or when a job overruns.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import threading
import time
from contextlib import suppress
from typing import Any, Final

import psutil

from app.paths import own_command, own_environment

_STARTUP_LIMIT_S: Final = 60.0
_MAX_ANSWER_BYTES: Final = 64 << 20
_BUSY_SHARE: Final = 0.5  # of its limit: a child that computed less did not get to its job


class WorkerTimeout(Exception):
    """The job overran its time limit; the child was killed and the next job gets a new one."""


class WorkerStalled(WorkerTimeout):
    """The job overran, but the child hardly computed: it was stopped, or got no processor."""


class WorkerDied(Exception):
    """The child ended during the job (out of memory, or it could not start)."""


class WorkerUnavailable(Exception):
    """This process has no room for a child: no files, no memory. The job may be fine."""


class KillableWorker:
    """One child process that runs a module of ours, started when first needed.

    Not for the event loop: `call` blocks for up to the limit. Calls from several threads queue.
    """

    def __init__(self, module: str, *args: str, start_limit_s: float = _STARTUP_LIMIT_S) -> None:
        self._start_limit_s = start_limit_s
        self._command = own_command(module, *args)
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def call(self, job: Any, limit_s: float) -> Any:
        """Send one JSON-able job, return its JSON answer.

        Raises WorkerTimeout after limit_s seconds of work (starting the child has its own
        limit), WorkerDied when the child ended, WorkerUnavailable when none can start. A child
        that was killed or held up from outside implies nothing about the job, which is then tried
        once more.
        """
        with self._lock:
            try:
                return self._attempt(job, limit_s)
            except (WorkerStalled, WorkerDied):
                return self._attempt(job, limit_s)

    def _attempt(self, job: Any, limit_s: float) -> Any:
        child = self._ready_child()
        begin_s = 0.0
        try:
            begin_s = _cpu_s(child.pid)
            _write_line(child, json.dumps(job).encode())
            return json.loads(_read_line(child, limit_s))
        except WorkerTimeout as error:
            used_s = _cpu_s(child.pid) - begin_s
            self._kill()
            if used_s < _BUSY_SHARE * limit_s:
                raise WorkerStalled(str(error)) from error
            raise
        except WorkerDied:
            self._kill()
            raise
        except OSError as error:  # its answer may still come: no other job may read it
            self._kill()
            raise WorkerUnavailable(str(error)) from error

    def start(self) -> None:
        """Start the child now, so that the first job need not wait for it."""
        with self._lock:
            self._ready_child()

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._kill()

    def _ready_child(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._kill()
        try:
            self._child = child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=own_environment(),
            )
            _read_line(child, self._start_limit_s)  # its first line says that it is ready
        except WorkerTimeout as error:  # implies nothing about any job
            self._kill()
            raise WorkerStalled(f"the worker did not start: {error}") from error
        except WorkerDied:
            self._kill()
            raise
        except OSError as error:
            self._kill()
            raise WorkerUnavailable(str(error)) from error
        return child

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not written to a dead process
                    pipe.close()


def _cpu_s(pid: int) -> float:
    """CPU time of the process so far."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:  # it has ended
        return 0.0
    return float(times.user + times.system)


def _write_line(child: subprocess.Popen[bytes], line: bytes) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(line + b"\n")
        child.stdin.flush()
    except OSError as error:
        raise WorkerDied(str(error)) from error


def _read_line(child: subprocess.Popen[bytes], limit_s: float) -> bytes:
    assert child.stdout is not None
    fd = child.stdout.fileno()
    deadline = time.monotonic() + limit_s
    parts: list[bytes] = []
    num_bytes = 0
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                raise WorkerTimeout(f"no answer within {limit_s:g} s")
            part = os.read(fd, 1 << 16)
            if not part:
                raise WorkerDied("the worker process ended")
            parts.append(part)
            num_bytes += len(part)
            if part.endswith(b"\n"):
                return b"".join(parts)
            if num_bytes > _MAX_ANSWER_BYTES:
                raise WorkerTimeout("the answer is too long")
