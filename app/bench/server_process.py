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
from contextlib import contextmanager
from pathlib import Path

import httpx

from app.bench.load.client import first_model
from app.bench.plan import ServerPlan
from app.bench.report import MeasurementError
from app.bench.terminal import console


@contextmanager
def running(name: str, server: ServerPlan, logs: Path) -> Iterator[str]:
    """Start the server and wait until it lists its model, which is yielded; stop it in the end.

    Its output goes to NAME.log in `logs`. Raises MeasurementError if it ends, or lists no model in
    time.
    """
    command = shlex.split(os.path.expandvars(server.command))
    if command[0] == "legato":  # that of this environment, also where it is not activated
        command[0] = shutil.which("legato", path=Path(sys.executable).parent) or "legato"
    environment = {key: os.path.expandvars(text) for key, text in server.environment.items()}
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            with console.status(f"starting {name}"):
                yield _wait_ready(process, server, log)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], server: ServerPlan, log: Path) -> str:
    deadline_s = time.monotonic() + server.ready_s
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise MeasurementError(f"{server.command!r} ended; its output is in {log}")
        try:
            answer = httpx.get(f"{server.url}/v1/models", timeout=5)
            if answer.status_code == 200 and answer.json()["data"]:
                return first_model(server.url)
        except (httpx.HTTPError, ValueError, KeyError):
            pass
        time.sleep(0.5)
    raise MeasurementError(f"no model at {server.url} within {server.ready_s:g} s; see {log}")
