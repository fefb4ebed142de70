"""Memory that a stage may take: what its container and its machine have left."""

from __future__ import annotations

from pathlib import Path

import torch

from actors.stage.memory import available_bytes, cgroup_headroom_bytes


def test_memory_within_a_container(tmp_path: Path) -> None:
    assert cgroup_headroom_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_headroom_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 150\n")
    assert cgroup_headroom_bytes(tmp_path) == 450


def test_memory_within_an_old_container(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    root.mkdir()
    (root / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_headroom_bytes(tmp_path) is None
    (root / "memory.limit_in_bytes").write_text("1000\n")
    (root / "memory.usage_in_bytes").write_text("1200\n")
    (root / "memory.stat").write_text("total_inactive_file 100\n")
    assert cgroup_headroom_bytes(tmp_path) == 0


def test_memory_of_this_machine() -> None:
    import psutil

    assert 0 < available_bytes(torch.device("cpu")) <= psutil.virtual_memory().total
