"""Runs a module in a process and a cluster of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def output_of(module: str, *arguments: str, folder: Path, timeout_s: float = 540) -> str:
    """What it prints; fails unless it ends with status 0."""
    output = folder / "output"
    with output.open("w") as file:  # no pipe: what a killed node leaves behind would keep it open
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=Path(__file__).resolve().parents[2],
            env={key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    assert done.returncode == 0, output.read_text()[-3000:]
    return output.read_text()
