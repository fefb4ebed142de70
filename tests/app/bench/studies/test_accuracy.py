"""`legato bench accuracy` reads held-out text with every weight and KV format."""

from __future__ import annotations

import json
import math
from pathlib import Path

from typer.testing import CliRunner

from app.cli.main import app


def test_narrower_formats_cost_little_and_in_order() -> None:
    run = CliRunner().invoke(
        app, ["bench", "accuracy", "--windows", "2", "--window", "128", "--json"]
    )
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert report["num_tokens"] == 2 * 127
    found = {r["variant"]: r for r in report["results"]}
    plain = found["bf16"]["perplexity"]
    assert 1 < plain < report["vocab_size"] / 100, "the demo model has learned something"
    assert found["bf16"]["rms_logprob_error"] == 0
    errors = [found[name]["rms_logprob_error"] for name in ("int8", "w8a8", "int4")]
    assert 0 < errors[0] < errors[1] < errors[2] < 1
    assert all(abs(math.log(r["perplexity"] / plain)) < 0.15 for r in report["results"])


def test_a_missing_text_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nothing.txt"
    run = CliRunner().invoke(app, ["bench", "accuracy", "--text", str(missing)])
    assert run.exit_code == 2
    assert "nothing.txt" in run.output
