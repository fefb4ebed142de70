"""Ray's worker processes as forks of one process that imports for all of them.

Ray starts a Python process for Serve's controller, the task that builds the application, every
replica, scheduler and rank. Each would import Ray for itself, and most of them Serve or torch:
one to three seconds of a core, one after the other, in a start and wherever one is replaced. Forks
share what was imported, in memory too.

The process imports while Ray's daemons start. Between two groups of modules it forks for whoever
waits: the first forks have no torch, whose import takes longest. If it has died, Ray's workers
import for themselves.
"""

from __future__ import annotations

import gc
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.cli import fork_request
from app.paths import own_command, own_environment

_GROUPS = (
    (
        "ray._private.workers.default_worker",
        "uvloop",
        "ray.serve._private.controller",
        "app.main",
    ),
    ("actors.stage.runner", "kernels.cpu.backend"),
)
# Read once, by Ray and libraries, as they are loaded: a worker's job, which it is told later; the
# process without which it ends, in the place of the raylet, which does not run yet (the command
# ends with its raylet); and numbers of threads, which would not be in the forks.
_READ_WHEN_LOADED = {
    "RAY_JOB_ID": "ffffffff",
    "RAY_RAYLET_PID": str(os.getpid()),
    "OMP_NUM_THREADS": "1",
}
_OOM_SCORE_ADJ = "1000"  # of all workers of Ray: they end before its daemons where memory runs out
_ROOM = " " * 200  # a process's title takes no more room than its first command line
_COMMAND = "--python_worker_command="  # of a raylet


class ForkServer:
    """That process, which ends with this one. Made before Ray starts, with Ray's environment."""

    @staticmethod
    def is_useful() -> bool:
        """Not tried where CUDA or Apple's libraries are loaded before the fork."""
        return sys.platform == "linux" and not Path("/dev/nvidiactl").exists()

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        number = self._listener.fileno()
        self._process = subprocess.Popen(
            own_command(__name__, str(number), _ROOM),
            pass_fds=[number],
            stdin=subprocess.PIPE,
            env={**_READ_WHEN_LOADED, **own_environment()},
            start_new_session=True,  # a signal to the command's group reaches only the command
        )

    def open(self, raylet: Sequence[str]) -> list[str]:
        """Listen beside Ray's own sockets. raylet: its command; returns one whose workers are
        forks."""
        sockets = next(Path(p.partition("=")[2]) for p in raylet if p.startswith("--store_socket"))
        path = str(sockets.parent / "forks")
        with self._listener:
            self._listener.bind(path)
            os.chmod(path, 0o600)  # who connects has commands run
            self._listener.listen(64)  # those that ask while it imports wait
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died
            self._process.stdin.write(b".")
            self._process.stdin.flush()
        given = _COMMAND + sys.executable
        ask = subprocess.list2cmdline([sys.executable, "-IS", fork_request.__file__, path])
        return [part.replace(given, _COMMAND + ask, 1) for part in raylet]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class _Request:
    """A worker's command, environment, folder and open outputs."""

    command: list[str]
    environment: dict[str, str]
    folder: str
    fds: list[int]


def _serve(listener: socket.socket) -> _Request:
    """Fork for everyone who asks. Returns in each fork, with what it is to become."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray does for all workers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing is left of a fork that has ended
    command = sys.stdin.fileno()
    for number, group in enumerate(_GROUPS):
        _import(group)
        if number == 0 and not os.read(command, 1):  # until `open`
            sys.exit()
        while select.select([listener], [], [], 0)[0]:
            if request := _fork(listener):
                return request
    while command not in select.select([listener, command], [], [])[0]:
        if request := _fork(listener):
            return request
    sys.exit()  # the command has ended


def _import(modules: Sequence[str]) -> None:
    with _drawn_by_the_system():
        for name in modules:
            importlib.import_module(name)
    assert threading.active_count() == 1, "a fork has only the thread that forks"
    gc.collect()
    gc.freeze()  # no collection in a fork copies what it shares


@contextmanager
def _drawn_by_the_system() -> Iterator[None]:
    """Ray's own random numbers, once it has drawn some, would be the same in all forks."""
    import ray.actor

    class SystemDrawn:
        @staticmethod
        def from_random() -> ray.ActorClassID:
            return ray.ActorClassID(os.urandom(ray.ActorClassID.size()))

    own: Any = ray.actor
    kept, own.ActorClassID = own.ActorClassID, SystemDrawn
    try:
        yield
    finally:
        own.ActorClassID = kept


def _fork(listener: socket.socket) -> _Request | None:
    """None in this process."""
    connection, _ = listener.accept()
    with connection:
        request = _read(connection)
        if os.fork() == 0:
            return request
        for fd in request.fds:
            os.close(fd)
        with suppress(OSError):  # who asked has given up
            connection.sendall(b".")
    return None


def _read(connection: socket.socket) -> _Request:
    content, fds, _, _ = socket.recv_fds(connection, 1, 3)
    while part := connection.recv(1 << 16):
        content += part
    command, environment, folder = marshal.loads(content)
    return _Request(command, environment, folder, fds)


def _become(request: _Request) -> None:
    raylet: Any = importlib.import_module("ray._raylet")  # which has no types
    os.setpgrp()  # Ray ends what a worker leaves behind by its group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, fd in enumerate(request.fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.environment)
    raylet.Config.initialize("")  # Ray had read its settings before it chose some itself
    os.chdir(request.folder)
    Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
    # Names the session, by which `serve` finds workers that are just starting.
    raylet.setproctitle(next(part for part in request.command if part.startswith("--session-name")))
    sys.argv[:] = request.command
    sys.path.insert(0, os.path.dirname(request.command[0]))
    runpy.run_path(request.command[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as opened:
        asked = _serve(opened)
    _become(asked)
