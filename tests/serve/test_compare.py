"""`legato bench compare` starts real servers, probes them and leaves none behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from app.cli.main import app
from tests.ports import free_port
from tests.serve.server_process import ROOT

DEMO = ROOT / "configs/serve/demo.yaml"


@pytest.mark.serve
@pytest.mark.long
def test_a_server_is_probed_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)  # as in a user's shell
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    port = free_port()
    plan = {
        "servers": {
            "legato": {
                "command": f"python -m app.cli.main serve {DEMO} --port {port}",
                "url": f"http://127.0.0.1:{port}",
                "environment": {"PYTHONPATH": str(ROOT)},
                "sends_objective": True,
            }
        },
        "decode": {"streams": [1, 2], "prompt_tokens": 8, "output_tokens": 600},
        "prefill": {"prompt_tokens": 64, "repeats": 2},
        "stall": {"streams": 2, "prompt_tokens": 64, "stream_tokens": 1500, "repeats": 1},
        "capacity": None,
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    out = tmp_path / "report.json"
    result = CliRunner().invoke(
        app, ["bench", "compare", str(tmp_path / "plan.yaml"), "--out", str(out), "--json"]
    )
    assert result.exit_code == 0, result.output
    medians = json.loads(out.read_text())["medians"]["legato"]
    assert len(medians) == 4
    assert all(value > 0 for value in medians.values())
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=2)


def test_a_plan_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("servers: {}\ndecodes: {}\n")
    result = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "plan.yaml")])
    assert result.exit_code == 2
    assert "decodes" in result.output


def test_a_server_that_ends_is_named_with_its_log(tmp_path: Path) -> None:
    plan = {"servers": {"broken": {"command": "false", "url": "http://127.0.0.1:9"}}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    result = CliRunner().invoke(
        app, ["bench", "compare", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "o.json")]
    )
    assert result.exit_code == 1
    assert "broken.log" in result.output
