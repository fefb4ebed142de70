"""The skeleton of every report."""

from __future__ import annotations

import datetime
import json
import math
import subprocess
from pathlib import Path
from typing import Annotated

import typer
from typer.testing import CliRunner

from app.bench.report import commit, make_report, publish


def report_of(arguments: list[str]) -> dict[str, object]:
    """What a small command reports when it is run with these."""
    app = typer.Typer()

    @app.command("measure")
    def measure(
        context: typer.Context,
        threads: int = 0,
        model: Path = Path("a/b"),
        api_key: str | None = None,
        as_json: Annotated[bool, typer.Option("--json")] = False,
        out: Path | None = None,
    ) -> None:
        results = {"rate": 1.5, "gap": math.nan, "rows": [{"error": math.inf}], "pair": (1, 2)}
        publish(make_report(context, results, {"threads": threads or 2}), as_json, out)

    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_a_report_says_when_where_and_with_what() -> None:
    report = report_of(["--json"])
    keys = ["command", "date", "commit", "machine", "versions", "settings"]
    assert list(report)[: len(keys)] == keys
    assert report["command"] == "measure"
    datetime.date.fromisoformat(str(report["date"]))
    assert isinstance(report["machine"], dict)
    assert report["machine"]["cores"] >= 1
    assert isinstance(report["versions"], dict)
    assert {"python", "torch", "ray"} <= report["versions"].keys()


def test_settings_are_those_that_took_effect() -> None:
    """And none that is a secret."""
    assert report_of(["--json"])["settings"] == {"threads": 2, "model": "a/b"}
    with_key = ["--json", "--threads", "7", "--api-key", "secret"]
    assert report_of(with_key)["settings"] == {"threads": 7, "model": "a/b"}


def test_a_figure_that_is_no_number_is_null() -> None:
    report = report_of(["--json"])
    assert report["rate"] == 1.5
    assert report["gap"] is None
    assert report["rows"] == [{"error": None}]
    assert report["pair"] == [1, 2]


def test_a_checkout_with_changes_is_no_commit_s(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert commit(tmp_path) == "unknown"
    git("init")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "--message=begin")
    git("tag", "--annotate", "--message=first", "v1")
    clean = git("rev-parse", "--short", "HEAD")
    assert commit(tmp_path) == clean
    (tmp_path / "report.json").write_text("{}\n")
    assert commit(tmp_path) == clean, "a file that is not tracked changes nothing"
    (tmp_path / "code.py").write_text("a = 2\n")
    assert commit(tmp_path) == f"{clean}-dirty"
