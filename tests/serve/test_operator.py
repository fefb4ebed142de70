"""The Kubernetes manifest's application comes up by the request that KubeRay's operator sends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_manifest_is_served_as_the_operator_deploys_it(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("w") as file:  # no pipe: what a killed node leaves behind would keep it open
        done = subprocess.run(
            [sys.executable, "-m", "tests.serve.operator_deploys"],
            cwd=Path(__file__).resolve().parents[2],
            env={key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=540,
            check=False,
        )
    assert done.returncode == 0, output.read_text()[-3000:]
    assert "came up" in output.read_text()
