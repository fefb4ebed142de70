"""A node leaves a fleet of several: a process and a cluster of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["drained", "killed"])
def test_streams_outlive_the_node_of_their_engine(how: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("w") as file:  # no pipe: what a killed node leaves behind would keep it open
        done = subprocess.run(
            [sys.executable, "-m", "tests.serve.nodes_leave", how],
            cwd=Path(__file__).resolve().parents[2],
            env={key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=540,
            check=False,
        )
    assert done.returncode == 0, output.read_text()[-3000:]
    assert "nothing was lost" in output.read_text()
