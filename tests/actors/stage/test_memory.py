"""Memory that a stage may take: what its container and its machine have left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.stage.memory import available_bytes, cgroup_headroom_bytes


def _v2(limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    stat = f"anon 300\ninactive_file {inactive}"
    return {"memory.max": limit, "memory.current": str(used), "memory.stat": stat}


def _v1(limit: int, used: int, inactive: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": str(limit),
        "memory.usage_in_bytes": str(used),
        "memory.stat": f"total_inactive_file {inactive}",
    }


_NO_LIMIT = 9223372036854771712  # as version 1 writes it


@pytest.mark.parametrize(
    ("own", "groups", "left"),
    [
        ("0::/", {}, None),
        ("0::/", {"": _v2("max", 700)}, None),
        ("0::/", {"": _v2("1000", 700, inactive=150)}, 450),  # a container
        ("0::/docker/id", {"": _v2("1000", 700)}, 300),  # one that knows its name outside
        (  # a unit of systemd, whose slice has a limit too
            "0::/system.slice/legato.service",
            {
                "system.slice": _v2("5000", 4900),
                "system.slice/legato.service": _v2("2000", 700, inactive=150),
                "user.slice": _v2("10", 10),
            },
            100,
        ),
        ("0::/system.slice/legato.service", {"system.slice/legato.service": _v2("90", 10)}, 80),
        ("4:memory:/", {"memory": _v1(_NO_LIMIT, 1200)}, None),
        ("4:memory:/", {"memory": _v1(1000, 1200, inactive=100)}, 0),
        (  # a job of Slurm
            "9:name=systemd:/\n4:cpuset,memory:/slurm/job_1/step_0",
            {
                "memory": _v1(_NO_LIMIT, 90_000),
                "memory/slurm/job_1": _v1(3000, 1000),
                "memory/slurm/job_1/step_0": _v1(_NO_LIMIT, 900),
            },
            2000,
        ),
        (  # version 2 beside version 1, without controllers
            "4:memory:/job\n1:cpu:/other\n0::/job",
            {"memory/job": _v1(1000, 400), "unified/job": {}, "memory/other": _v1(10, 10)},
            600,
        ),
    ],
)
def test_the_least_room_in_the_groups_above_counts(
    tmp_path: Path, own: str, groups: dict[str, dict[str, str]], left: int | None
) -> None:
    (tmp_path / "own").write_text(own + "\n")
    for name, files in groups.items():
        (folder := tmp_path / "groups" / name).mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_text(content + "\n")
    assert cgroup_headroom_bytes(tmp_path / "groups", tmp_path / "own") == left
    assert cgroup_headroom_bytes(tmp_path / "groups", tmp_path / "none") is None


def test_memory_of_this_machine() -> None:
    import psutil

    assert 0 < available_bytes(torch.device("cpu")) <= psutil.virtual_memory().total
