"""A minute of chaos: real processes are killed, frozen and starved, and no client sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 35  # of faults; the start, the unfailed run and the end take as long


@pytest.mark.serve
@pytest.mark.long
@pytest.mark.timeout(240)
def test_nothing_is_lost_changed_or_left(tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    command = [
        *(sys.executable, "-m", "app.cli.main", "chaos", "--minutes", str(SECONDS / 60)),
        *("--streams", "8", "--out", str(out), "--log", str(tmp_path / "server.log")),
        *("--faults", "stage killed,scheduler killed,stage paused,scheduler paused,replica paused,"
         "template worker killed,grammar worker killed,no files for the replica,controller killed"),
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.exists(), run.stdout[-2000:] + run.stderr[-3000:]
    found = json.loads(out.read_text())
    wrong = {key: found[key] for key in ("failures", "leaks", "left_over", "skipped", "faults")}
    assert found["is_clean"], wrong
    assert run.returncode == 0
    assert found["num_survived"] == found["num_faults"] > 0  # as many as this machine has time for
    assert found["num_streams"] > 0
