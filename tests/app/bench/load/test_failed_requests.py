"""What a load's command says and returns where a server fails some requests or refuses all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli.main import app

QUOTE = "/v1/slo/quote"
# A refusal that comes later than the objective of the first token counts as a promise not kept.
OVERLOAD = "bench overload --times 1,2 --qps 2 --lengths 4x2 --seconds 1 --ttft-ms 60000 --url"


@contextmanager
def serving(status_of: Callable[[int], int]) -> Iterator[str]:
    """The address of a server of one model. status_of: of its nth completion, from 0."""
    numbers = count()

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status = 200 if self.path == QUOTE else status_of(next(numbers))
            if status != 200:
                self._answer(status, b'{"error": {"message": "no [room]"}}')
            elif self.path == QUOTE:
                predicted = {"ttft_ms": 1, "ttft_bound_ms": 2}
                said = {"predicted": predicted, "can_serve_now": True, "retry_after_s": None}
                self._answer(200, json.dumps(said).encode())
            else:
                usage = {"completion_tokens": asked["max_tokens"]}
                events = [{"choices": [{"text": "a"}]}] * asked["max_tokens"]
                events += [{"choices": [], "usage": usage}]
                text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
                self._answer(200, text.encode())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    "command",
    [
        "serve --qps 4 --lengths 4x2",
        "shift --phases 4x2@4",
        "overload --times 1 --qps 4 --lengths 4x2",
        "quote --qps 4 --lengths 4x2",
    ],
)
def test_a_failed_request_is_told_and_the_exit_status_is_1(command: str) -> None:
    with serving(lambda number: 500 if number == 1 else 200) as url:
        line = ["bench", *command.split(), "--seconds", "1", "--url", url, "--json"]
        result = CliRunner().invoke(app, line)
    assert result.exit_code == 1, result.output
    assert "requests failed: 1 (500: no [room])" in result.stderr
    assert json.loads(result.stdout)["command"]  # what was measured is not lost


def test_a_load_that_is_refused_whole_loses_none_before_it() -> None:
    with serving(lambda number: 200 if number < 2 else 429) as url:
        result = CliRunner().invoke(app, [*OVERLOAD.split(), url, "--json"])
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)["loads"]
    assert (first["refused_share"], second["refused_share"]) == (0.0, 1.0)
    assert second["kept_share"] is None


def test_a_load_that_fails_whole_measures_nothing() -> None:
    with serving(lambda number: 404) as url:
        result = CliRunner().invoke(app, [*OVERLOAD.split(), url])
    assert result.exit_code == 1
    assert "none of 2 requests was answered (404: no [room])" in result.stderr


def test_an_overload_that_is_refused_whole_says_why() -> None:
    with serving(lambda number: 429) as url:
        result = CliRunner().invoke(app, [*OVERLOAD.split(), url])
    assert result.exit_code == 1
    assert "every request was refused (429: no [room])" in result.stderr
