"""How `legato serve` ends where a setting will not do, which only the replica finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DEMO = {"path": "configs/models/demo"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"api": {"api_keys": {"env:LEGATO_NO_SUCH_KEY": {}}}},
            "api.api_keys: env:LEGATO_NO_SUCH_KEY: it holds no key",
        ),
        (  # found by a stage, whose errors reach the command through the scheduler
            {"parallel": {"device": "cpu"}, "model": {**DEMO, "quantization": "fp8"}},
            "model.quantization: backend",
        ),
    ],
)
def test_a_setting_that_only_the_replica_can_check_ends_as_one_found_early(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    config = yaml.safe_load((ROOT / "configs/serve/demo.yaml").read_text())
    args = config["applications"][0]["args"]
    args.update(changes, engine={"standby": False})
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    own = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "OMP_"))}
    command = [sys.executable, "-P", "-m", "app.cli.main", "serve", str(path)]
    ran = subprocess.run(
        [*command, "--port", str(free_port())],
        cwd=ROOT,
        env={**own, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert f"error: {said}" in ran.stderr
    assert ran.returncode == 2, ran.stderr
