"""Shares of dead engines are deleted, those of live ones are not."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from actors.transport.shares import make_private, remove_unheld, shares_root

HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def share(root: Path, *names: str) -> Path:
    """One with a block, and what a killed writer leaves."""
    folder = root.joinpath(*names)
    folder.mkdir(parents=True)
    for name in ("lock", "00.kv", "01.part"):
        (folder / name).write_text("x")
    return folder


def test_only_what_nobody_holds_is_deleted(tmp_path: Path) -> None:
    held, left = share(tmp_path, "m", "stage-0", "0"), share(tmp_path, "m", "stage-0", "1")
    other = share(tmp_path, "n", "stage-0", "0")
    command = [sys.executable, "-c", HOLD, str(held / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        remove_unheld(tmp_path)
        assert sorted(path.name for path in held.iterdir()) == ["00.kv", "01.part", "lock"]
        assert not left.exists()
        assert not other.parents[1].exists()
        process = psutil.Process(holder.pid)
        holder.kill()
        remove_unheld(tmp_path, after=[process])  # waits for its end
    assert list(tmp_path.iterdir()) == []
    remove_unheld(tmp_path / "absent")


def test_a_share_that_is_being_deleted_is_left_alone(tmp_path: Path) -> None:
    folder = share(tmp_path, "m", "stage-0", "0")
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_unheld(tmp_path)
    assert (folder / "00.kv").exists()


def test_nobody_else_may_enter(tmp_path: Path) -> None:
    root = shares_root(tmp_path)
    assert root == tmp_path / f"legato-{os.geteuid()}"
    for _ in range(2):
        make_private(root)
        assert root.stat().st_mode & 0o777 == 0o700
        root.chmod(0o755)
    root.rmdir()
    (tmp_path / "elsewhere").mkdir()
    root.symlink_to(tmp_path / "elsewhere")  # by somebody who was there before
    with pytest.raises(PermissionError):
        make_private(root)


def test_nothing_is_deleted_through_a_link(tmp_path: Path) -> None:
    """Somebody else may have made the root, or a link in it, before this user's first server."""
    kept = share(tmp_path, "cache", "stage-0", "0")
    root = tmp_path / "root"
    (root / "m" / "stage-0").mkdir(parents=True)
    (root / "m" / "stage-0" / "0").symlink_to(kept)
    (root / "n").symlink_to(tmp_path / "cache")
    remove_unheld(root)
    assert (kept / "00.kv").exists()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(tmp_path / "cache" / "..")
    share(tmp_path, "m", "stage-0", "1")
    remove_unheld(elsewhere)
    assert (tmp_path / "m" / "stage-0" / "1" / "00.kv").exists()
