"""What an engine finds on its machine: semaphores of the dead, and its container's limits."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

from actors.left_behind import remove_semaphores
from actors.placement import cpu_quota


def test_semaphores_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = [f"sem.hdr{ended.pid}-17953663164", f"sem.obj{ended.pid}-17953663165"]
    kept = [f"sem.hdr{os.getpid()}-17953663164", f"sem.mp{ended.pid}-1", f"sem.hdr{ended.pid}"]
    for name in (*left, *kept):
        (tmp_path / name).touch()
    assert remove_semaphores(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
    assert remove_semaphores(tmp_path / "none") == 0


def test_the_least_quota_of_the_groups_above_counts(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert cpu_quota(tmp_path) == 2.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) == math.inf
