"""`legato status`: a table of 80 columns, in which an engine at rest shows no figures of its last
step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from app.cli.main import app

runner = CliRunner()


def status(monkeypatch: pytest.MonkeyPatch, code: int, answer: dict[str, Any]) -> str:
    """What the command prints where the server gives this answer to whoever has the key."""

    def get(url: str, headers: dict[str, str], **_: Any) -> httpx.Response:
        assert headers == {b"authorization": "Bearer ké".encode()}
        return httpx.Response(code, json=answer, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    return runner.invoke(app, ["status", "--api-key", "ké"]).output


def engine(name: str, num_running: int) -> dict[str, Any]:
    return {
        "id": name, "role": "prefill", "state": "serving",
        "num_running": num_running, "num_waiting": 1234, "num_blocks": 100, "num_free_blocks": 0,
        "least_slack_s": -12.3456, "step_budget": 8192, "tokens_per_s": 123456.0,
    }  # fmt: skip


def test_no_number_is_cut_and_a_rest_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [engine("a" * 32, 1234), engine("b", 0)]
    printed = status(monkeypatch, 200, {"models": ["m"], "num_blocks": 100, "engines": engines})
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert "tokens/s" in printed
    assert "…" not in printed
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if "serving" in line}
    (busy,) = (row for name, row in rows.items() if name.startswith("a"))
    assert busy[1:] == [
        "prefill",
        "serving",
        "1234",
        "1234",
        "100%",
        "-12346",
        "ms",
        "8192",
        "123456",
    ]
    assert rows["b"][-2:] == ["–", "–"]


def test_every_engine_of_a_fleet_has_its_name_role_and_state_on_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joins = {"id": "8quhb8tu.f32ca0", "node": "n", "num_streams_here": 0}  # it has not said more
    engines = [
        engine("0bicr45d.2b0f0b", 1234),
        {**engine("55wx1jkx.f32ca1", 1234), "role": "decode", "state": "draining"},
        joins,
    ]
    printed = status(monkeypatch, 200, {"models": ["m"], "num_blocks": 100, "engines": engines})
    assert all(len(line) <= 80 for line in printed.splitlines())
    lines = [line.split() for line in printed.splitlines()]
    assert lines[0][:3] == ["engine", "role", "state"]
    assert [line[:3] for line in lines if len(line) > 8][1:] == [
        ["0bicr45d.2b0f0b", "prefill", "serving"],
        ["55wx1jkx.f32ca1", "decode", "draining"],
        ["8quhb8tu.f32ca0", "–", "starting"],
    ]


def ask(
    monkeypatch: pytest.MonkeyPatch, statuses: dict[str, dict[str, Any]], *arguments: str
) -> Result:
    """The command at a server of several models."""

    def get(url: str, params: dict[str, str], **_: Any) -> httpx.Response:
        name = params.get("model", next(iter(statuses)))
        found = {"model": name, "models": list(statuses), **statuses[name]}
        code = 503 if "reason" in found else 200
        return httpx.Response(code, json=found, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    return runner.invoke(app, ["status", *arguments])


def test_every_model_is_shown_or_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = {
        "first": {"ready": False, "reason": "it sleeps"},
        "second": {"num_blocks": 100, "engines": [engine("e2", 1)]},
        "third": {"num_blocks": 100, "engines": [engine("e3", 1), engine("e4", 0)]},
    }
    lines = ask(monkeypatch, statuses).output.splitlines()
    begin = {name: lines.index(name) for name in statuses}
    assert lines[begin["first"] + 1] == "it sleeps"
    rows = {
        name: [(line.split() or [""])[0] for line in lines].index(name)
        for name in ("e2", "e3", "e4")
    }
    assert begin["first"] < begin["second"] < rows["e2"] < begin["third"] < rows["e3"] < rows["e4"]
    found = json.loads(ask(monkeypatch, statuses, "--json").output)
    assert [one["model"] for one in found] == list(statuses)
    one = ask(monkeypatch, statuses, "--model", "third")
    assert "e3" in one.output
    assert "second" not in one.output
    assert "e2" not in one.output
    assert json.loads(ask(monkeypatch, statuses, "--model", "third", "--json").output) == found[2]
    refused = ask(monkeypatch, statuses, "--model", "first")
    assert (refused.exit_code, refused.output.strip()) == (
        1,
        "error: http://127.0.0.1:8000: it sleeps",
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"error": {"message": "Give a valid API key.", "code": None}}, "Give a valid API key."),
        ({"reason": "starting"}, "starting"),
        ({}, "status 503 Service Unavailable"),
    ],
)
def test_a_refusal_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], said: str
) -> None:
    printed = status(monkeypatch, 503, answer)
    assert printed == f"error: http://127.0.0.1:8000: {said}\n"


class _Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"error": {"message": "it rests"}}).encode()
        self.send_response(500)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("proxies", "said"),
    [
        ({"HTTP_PROXY": "http://127.0.0.1:1"}, "it rests"),
        ({"http_proxy": "http://127.0.0.1:1", "NO_PROXY": "*.example.com"}, "it rests"),
        ({"ALL_PROXY": "socks5://127.0.0.1:1"}, "error: "),  # needs what may be installed or not
    ],
)
def test_a_proxy_is_not_asked_for_this_machine(proxies: dict[str, str], said: str) -> None:
    own = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "-m", "app.cli.main", "status", "--url", url]
        asked = subprocess.run(
            command, env=own | proxies, capture_output=True, text=True, check=False
        )
        server.shutdown()
    assert said in asked.stderr
    assert "Traceback" not in asked.stderr
    assert asked.returncode == 1


def test_who_gives_no_key_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = status(monkeypatch, 401, {"error": {"message": "Give a valid API key: ..."}})
    assert "Give a valid API key: ...\n" in printed
    assert "--api-key or the environment variable LEGATO_API_KEY" in printed
