"""A minute of chaos: real processes are killed, frozen and starved, and no client sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 35  # of faults; the start, the unfailed run and the end take as long


pytestmark = [pytest.mark.serve, pytest.mark.long]


def chaos(folder: Path, *options: str) -> dict[str, Any]:
    """The report of a run in which nothing was lost, changed or left."""
    out = folder / "chaos.json"
    command = [
        *(sys.executable, "-m", "app.cli.main", "chaos", *options),
        *("--out", str(out), "--log", str(folder / "server.log")),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.exists(), run.stdout[-2000:] + run.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    wrong = {key: found[key] for key in ("failures", "leaks", "left_over", "skipped", "faults")}
    assert found["is_clean"], wrong
    assert run.returncode == 0
    assert found["num_survived"] == found["num_faults"] > 0  # as many as this machine has time for
    assert found["num_streams"] > 0
    return found


@pytest.mark.timeout(240)
def test_nothing_is_lost_changed_or_left(tmp_path: Path) -> None:
    kinds = (
        "stage killed,scheduler killed,stage paused,scheduler paused,replica paused,"
        "template worker killed,grammar worker killed,no files for the replica,controller killed"
    )
    chaos(tmp_path, "--minutes", str(SECONDS / 60), "--streams", "8", "--faults", kinds)


@pytest.mark.timeout(600)
def test_a_fleet_loses_changes_and_refuses_nothing(tmp_path: Path) -> None:
    """An engine is killed, every replica is replaced by an update, an engine leaves and another
    comes, and Serve's controller is killed, with twenty streams open and five requests a second."""
    kinds = ["engine killed", "fleet updated", "fleet scaled", "controller killed"]
    options = ["--config", "configs/serve/two_replicas.yaml", "--streams", "20", "--qps", "5"]
    found = chaos(tmp_path, *options, "--count", str(len(kinds)), "--faults", ",".join(kinds))
    assert set(found["faults"]) == set(kinds)
    assert all(row["num_streams_open"] > 0 for row in found["faults"].values())
    assert found["num_refused"] == 0
