"""Every `python` and `bash` block of the documentation runs as it stands, but for the address.

Blocks that are not to be run (they install, train or take over a machine) are fenced as `sh`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.live_server import LiveServer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000"


def snippets() -> Iterator[tuple[str, str, str]]:
    """(where, language, text) of every block that is run."""
    rooms = (path for room in ("app", "actors", "kernels", "configs") for path in
             sorted((ROOT / room).rglob("*.md")))  # fmt: skip
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *rooms):
        text = path.read_text()
        for found in BLOCK.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path.relative_to(ROOT)}:{line}", found[1], found[2]


FOUND = list(snippets())


@pytest.fixture
def own_application(own_serve: str) -> Iterator[None]:
    """Room for an application that a snippet runs itself."""
    from ray import serve

    yield
    serve.delete("default")


def run_python(text: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(text, "snippet", "exec"), {"__name__": "__main__"})
    return output.getvalue()


@pytest.mark.parametrize(
    ("language", "text"),
    [pytest.param(language, text, id=where) for where, language, text in FOUND],
)
def test_snippet_runs(
    language: str,
    text: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    if ADDRESS in text:
        server: LiveServer = request.getfixturevalue("demo")
        text = text.replace(ADDRESS, server.url)
    if "serve.run(" in text:
        request.getfixturevalue("own_application")
    if language == "python":
        assert run_python(text) or "assert " in text  # it shows something, or checks it
        return
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, env=tools, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout
