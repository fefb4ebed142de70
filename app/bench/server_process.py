"""One server of a comparison as a process: started, waited for, stopped."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from app.bench.load.client import ask, first_model, server_root
from app.bench.plan import ServerPlan
from app.bench.report import MeasurementError
from app.bench.terminal import console

_DIE_WITHIN_S = 10.0


@contextmanager
def running(name: str, server: ServerPlan, logs: Path) -> Iterator[str]:
    """Start the server and wait until it lists its model, which is yielded; stop it in the end.

    Its output is added to NAME.log in `logs`. Raises MeasurementError if it cannot be started,
    ends, or lists no model in time, or if another server answers at its address.
    """
    command = shlex.split(os.path.expandvars(server.command)) or [""]
    if command[0] == "legato":  # that of this environment, also where it is not activated
        command[0] = shutil.which("legato", path=Path(sys.executable).parent) or "legato"
    environment = {key: os.path.expandvars(text) for key, text in server.environment.items()}
    if _answers(server.url):
        raise MeasurementError(f"another server answers at {server.url}")
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.log"
    with log.open("a") as sink:
        try:
            process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as error:
            raise MeasurementError(f"{server.command!r} cannot be started: {error}") from error
    try:
        with console.status(f"starting {name}"):
            model = _wait_ready(process, server, log)
        yield model
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a server as Ctrl-C does; then end the rest of its group, which would disturb the next
    server, and wait until it is gone."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        pass
    finally:
        group = [p for p in psutil.process_iter() if _group(p.pid) == process.pid]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _wait_gone(group)


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _wait_gone(processes: list[psutil.Process]) -> None:
    deadline_s = time.monotonic() + _DIE_WITHIN_S
    while any(map(is_alive, processes)) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def is_alive(process: psutil.Process) -> bool:
    """Not if it has ended and only its parent has not noticed."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_ready(process: subprocess.Popen[bytes], server: ServerPlan, log: Path) -> str:
    deadline_s = time.monotonic() + server.ready_s
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise MeasurementError(f"{server.command!r} ended; its output is in {log}")
        if _answers(server.url):
            with suppress(MeasurementError):  # it may not list its model yet
                return first_model(server.url)
        time.sleep(0.5)
    raise MeasurementError(f"no model at {server.url} within {server.ready_s:g} s; see {log}")


def _answers(url: str) -> bool:
    try:
        return ask(f"{server_root(url)}/v1/models", 5).status_code == 200
    except httpx.HTTPError:
        return False
