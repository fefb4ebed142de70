"""What an engine finds on its machine: its container's limits."""

from __future__ import annotations

import math
from pathlib import Path

from actors.executor.placement import cpu_quota


def test_the_least_quota_of_the_groups_above_counts(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert cpu_quota(tmp_path) == 2.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) == math.inf
