"""Ray workers of the tests' own cluster as forks of one process that has imported what they need.

An engine has a process for its scheduler and one for each rank, which spend most of a short life on
importing Ray and torch: three seconds of a core. Servers under test (`legato serve`) start their
processes as a user's does.
"""

from __future__ import annotations

import gc
import importlib
import marshal
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests import fork_request

_IMPORTED = (
    "ray._private.workers.default_worker",
    "uvloop",
    "actors.engine.scheduler",
    "actors.stage.actor",
    "actors.stage.runner",
    "kernels.cpu.backend",
)
_OPTION = "--python_worker_command="  # of a raylet


@contextmanager
def forking(folder: Path) -> Iterator[None]:
    """The workers of a cluster that is started meanwhile are forks. folder: for the socket."""
    from ray._private import services

    start = services.start_ray_process
    python = folder / "python"
    python.write_text(f"#!{sys.executable} -IS\n{Path(fork_request.__file__).read_text()}")
    python.chmod(0o700)

    def start_process(command: Sequence[str], *arguments: Any, **options: Any) -> Any:
        asking = [_asking(str(part), python) for part in command]
        return start(asking, *arguments, **options)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / fork_request.SOCKET))
        listener.listen(64)  # those that ask while it imports wait
        number = listener.fileno()
        process = subprocess.Popen([sys.executable, "-m", __name__, str(number)], pass_fds=[number])
    services.start_ray_process = start_process
    try:
        yield
    finally:
        services.start_ray_process = start
        process.kill()
        process.wait()


def _asking(part: str, python: Path) -> str:
    """Of a raylet's command, so that its workers are started by that file."""
    return part.replace(_OPTION + sys.executable, f"{_OPTION}{python}", 1)


@dataclass
class _Request:
    """A worker's command, environment, folder and open outputs."""

    command: list[str]
    environment: dict[str, str]
    folder: str
    fds: list[int]


def _serve(listener: socket.socket) -> _Request:
    """Fork for everyone who asks. Returns in each fork, with what it is to become."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing is left of a fork that has ended
    while True:
        connection, _ = listener.accept()
        with connection:
            request = _read(connection)
            if "ray" not in sys.modules:
                _import_all(request.environment)
            if os.fork() == 0:
                return request
            for fd in request.fds:
                os.close(fd)
            with suppress(OSError):  # who asked has given up
                connection.sendall(b".")


def _read(connection: socket.socket) -> _Request:
    content, fds, _, _ = socket.recv_fds(connection, 1, 3)
    while part := connection.recv(1 << 16):
        content += part
    return _Request(*marshal.loads(content), fds)


def _import_all(environment: dict[str, str]) -> None:
    os.environ.update(environment)  # Ray reads all its variables but a few when it is loaded
    import ray.actor

    class SystemDrawn:
        @staticmethod
        def from_random() -> ray.ActorClassID:
            return ray.ActorClassID(os.urandom(ray.ActorClassID.size()))

    # Ray's own random numbers, once it has drawn some, would be the same in all forks.
    with mock.patch.object(ray.actor, "ActorClassID", SystemDrawn):
        for name in _IMPORTED:
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has only the thread that forks"
    gc.freeze()  # no collection in a fork copies what it shares


def _become(request: _Request) -> None:
    os.setpgrp()  # Ray ends what a worker leaves behind by its group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, fd in enumerate(request.fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    sys.argv[:] = request.command
    sys.path.insert(0, os.path.dirname(request.command[0]))
    runpy.run_path(request.command[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as opened:
        asked = _serve(opened)
    _become(asked)
