"""Ray's worker processes as forks of one process that imports for all of them.

Ray starts a Python process for Serve's controller, the task that builds the application, every
replica, scheduler and rank. Each would import Ray for itself, and most of them Serve or torch:
one to three seconds of a core, one after the other, in a start and wherever one is replaced. Forks
share what was imported, in memory too.

The process imports while Ray's daemons start. Between two groups of modules it forks for whoever
waits: the first forks have no torch, whose import takes longest. If it dies, Ray starts workers by
themselves.
"""

from __future__ import annotations

import gc
import importlib
import marshal
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from unittest import mock

from app.cli import fork_request

_GROUPS = (
    (
        "ray._private.workers.default_worker",
        "uvloop",
        "ray.serve._private.controller",
        "app.main",
    ),
    ("actors.stage.runner", "kernels.cpu.backend"),
)
# What Ray's raylet says to each worker, and libraries read once, when they are loaded: a job that is
# told later, the process without which a worker ends, as it has no raylet then (this one, as the
# raylet has not started yet), and threads, which would not be in the forks.
_READ_WHEN_LOADED = {
    "RAY_JOB_ID": "ffffffff",
    "RAY_RAYLET_PID": str(os.getpid()),
    "OMP_NUM_THREADS": "1",
}
_FIRST_TO_END = "1000"  # if memory runs out, like all workers of Ray
_OPTION = "--python_worker_command="  # of a raylet


class ForkServer:
    """That process, which ends with this one. Start it before Ray, with Ray's environment set."""

    def __init__(self) -> None:
        # Ray's own folders do not exist yet, and a socket's path must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="legato-", dir="/tmp"))
        python = self._folder / "python"
        python.write_text(f"#!{sys.executable} -IS\n{Path(fork_request.__file__).read_text()}")
        python.chmod(0o700)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._folder / fork_request.SOCKET))
            listener.listen(64)  # those that ask while it imports wait
            number = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(number), str(self._folder)],
                pass_fds=[number],
                stdin=subprocess.PIPE,
                env={**_READ_WHEN_LOADED, **os.environ},
            )

    def replace_python(self, command: Sequence[str]) -> list[str]:
        """A raylet's command with which its workers are forks."""
        begin, own = _OPTION + sys.executable, f"{_OPTION}{self._folder / 'python'}"
        return [part.replace(begin, own, 1) for part in command]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass
class _Request:
    """A worker's command, environment, folder and open outputs."""

    command: list[str]
    environment: dict[str, str]
    folder: str
    fds: list[int]


def _serve(listener: socket.socket, folder: str) -> _Request:
    """Fork for everyone who asks. Returns in each fork, with what it is to become."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # like all workers of Ray
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing is left of a fork that has ended
    for group in _GROUPS:
        _import(group)
        while select.select([listener], [], [], 0)[0]:
            if request := _fork(listener):
                return request
    while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [])[0]):
        if ready and (request := _fork(listener)):
            return request
    shutil.rmtree(folder, ignore_errors=True)  # the command has ended without `close`
    sys.exit()


def _import(modules: Sequence[str]) -> None:
    import ray.actor

    class SystemDrawn:
        @staticmethod
        def from_random() -> ray.ActorClassID:
            return ray.ActorClassID(os.urandom(ray.ActorClassID.size()))

    # Ray's own random numbers, once it has drawn some, would be the same in all forks.
    with mock.patch.object(ray.actor, "ActorClassID", SystemDrawn):
        for name in modules:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # no collection in a fork copies what it shares


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
    return _Request(*marshal.loads(content), fds)


def _become(request: _Request) -> None:
    from ray._raylet import Config

    os.setpgrp()  # Ray ends what a worker leaves behind by its group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, fd in enumerate(request.fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.environment)
    Config.initialize("")  # Ray has read the variables as they were before it chose its own
    os.chdir(request.folder)
    Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_END)
    sys.argv[:] = request.command
    sys.path[0] = os.path.dirname(request.command[0])
    runpy.run_path(request.command[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as opened:
        asked = _serve(opened, sys.argv[2])
    _become(asked)
