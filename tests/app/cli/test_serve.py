"""What `legato serve` says and does while it starts and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli.serve import _GUARD, _end_by, _wait, _with_birth


@pytest.mark.parametrize(
    ("before", "ends"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)], ids=["tty", "nohup"]
)
def test_the_end_of_the_terminal_is_one_of_the_server_unless_it_is_to_outlive_it(
    before: signal.Handlers, ends: bool
) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept = {number: signal.getsignal(number) for number in numbers}
    stopped = threading.Event()
    try:
        signal.signal(signal.SIGHUP, before)
        _end_by(lambda *_: stopped.set())
        signal.raise_signal(signal.SIGHUP)
        assert stopped.is_set() == ends
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_the_guard_ends_no_process_that_has_the_number_of_another() -> None:
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        subprocess.Popen(waits, stdin=subprocess.PIPE) as own,
        subprocess.Popen(waits, stdin=subprocess.PIPE) as other,
    ):
        gone = f"{other.pid}:{int(_with_birth(other.pid).partition(':')[2]) - 1}"
        subprocess.run(
            ["/bin/sh", "-c", _GUARD, "guard", gone, "4194304:1", _with_birth(own.pid)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "SESSION": "session_of_none", "GRACE_S": "0"},
        )
        assert own.wait() == -signal.SIGKILL
        assert other.poll() is None


_RELOADED = """
import os, signal
from pathlib import Path
from app.cli import serve

def load_config(target):
    os.kill(os.getpid(), signal.SIGUSR1)
    raise serve.SettingsError("read on")

serve.load_config = load_config
serve.serve(Path("none"))
"""


def test_a_reload_before_there_is_a_server_ends_nothing() -> None:
    ran = subprocess.run([sys.executable, "-c", _RELOADED], capture_output=True, text=True)
    assert "error: read on" in ran.stderr


@pytest.mark.ray  # whose status is asked
def test_a_replica_that_finds_no_room_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = "Deployment 'A' has 1 replicas that\nhave taken more than 30s to be scheduled."
    told = iter([("DEPLOYING", waits), ("DEPLOYING", waits), ("DEPLOY_FAILED", "it broke")])

    def status() -> Any:
        state, message = next(told)
        deployments = {"A": SimpleNamespace(message=message)}
        application = SimpleNamespace(
            status=SimpleNamespace(value=state), message="", deployments=deployments
        )
        return SimpleNamespace(applications={"legato": application})

    monkeypatch.setattr("ray.serve.status", status)
    monkeypatch.setattr("app.cli.serve._STATUS_PERIOD_S", 0.0)
    spinner: Any = SimpleNamespace(update=lambda text: None)
    assert _wait("http://127.0.0.1:9", [], spinner, threading.Event(), []) == "it broke"
    said = "Serve: Deployment 'A' has 1 replicas that have taken more than 30s to be scheduled.\n"
    assert capsys.readouterr().err == said
