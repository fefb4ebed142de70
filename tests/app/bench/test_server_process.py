"""A server of a comparison: a real process, by its readiness and its end."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import httpx
import pytest

from app.bench.plan import ServerPlan
from app.bench.report import MeasurementError
from app.bench.server_process import running
from tests.ports import free_port

LISTS_A_MODEL = """
import http.server, json, os, sys

class Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": os.environ["NAME"]}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

try:
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Models).serve_forever()
except KeyboardInterrupt:
    print("told to end")
"""


def _plan(script: str, port: int, ready_s: float = 60.0) -> ServerPlan:
    command = shlex.join([sys.executable, "-uc", script, str(port)])
    url = f"http://127.0.0.1:{port}"
    return ServerPlan(
        command=command, url=url, environment={"NAME": "$LEGATO_TEST_MODEL"}, ready_s=ready_s
    )


def test_it_runs_until_it_is_no_longer_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGATO_TEST_MODEL", "tiny")
    plan = _plan(LISTS_A_MODEL, free_port())
    with running("small", plan, tmp_path / "logs") as model:
        assert model == "tiny"
        with (
            pytest.raises(MeasurementError, match="another server answers"),
            running("second", plan, tmp_path / "logs"),
        ):
            raise AssertionError("it would be taken for the second")
    with pytest.raises(httpx.ConnectError):
        httpx.get(plan.url)
    assert "told to end" in (tmp_path / "logs" / "small.log").read_text()


def test_one_that_ends_is_named_with_its_output(tmp_path: Path) -> None:
    plan = _plan("print('no memory')", free_port())
    with (
        pytest.raises(MeasurementError, match=r"ended; its output is in .*broken\.log"),
        running("broken", plan, tmp_path),
    ):
        raise AssertionError("it never ran")
    assert "no memory" in (tmp_path / "broken.log").read_text()


def test_one_that_is_not_installed_is_named(tmp_path: Path) -> None:
    plan = ServerPlan(command="$NO_SUCH_VARIABLE/bin/serve", url=f"http://127.0.0.1:{free_port()}")
    with (
        pytest.raises(MeasurementError, match=r"NO_SUCH_VARIABLE.* cannot be started"),
        running("absent", plan, tmp_path),
    ):
        raise AssertionError("it never ran")


def test_processes_that_it_leaves_are_ended(tmp_path: Path) -> None:
    """Its port is free for the next server, although the one that listens ignores Ctrl-C."""
    begin = "import os, signal\nif os.fork():\n    signal.pause()\n"
    stubborn = begin + "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + LISTS_A_MODEL
    plan = _plan(stubborn, free_port())
    with running("stubborn", plan, tmp_path):
        pass
    with pytest.raises(httpx.ConnectError):
        httpx.get(plan.url)


def test_one_that_lists_no_model_is_stopped(tmp_path: Path) -> None:
    plan = _plan("import threading; threading.Event().wait()", free_port(), ready_s=0.1)
    with (
        pytest.raises(MeasurementError, match=r"no model at .* within 0\.1 s"),
        running("silent", plan, tmp_path),
    ):
        raise AssertionError("it never answered")
