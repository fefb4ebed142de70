"""Where the engines of a node keep the KV that they share, and what becomes of it when they die.

A share is a folder that its rank holds by a lock, which ends with the process: so a share that
nobody holds was left by a rank that died. Engines delete such shares as they start and as they end;
until then its peers may read it. Layout: ROOT/MODEL/RANK/SHARE.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")
_DIES_WITHIN_S = 5.0


def shares_root(folder: Path = MEMORY) -> Path:
    """The root of this user's shares in a folder that others may write to."""
    return folder / f"legato-{os.geteuid()}"


def make_private(root: Path) -> None:
    """Make the root, which nobody else may enter: blocks tell of prompts, and are believed.

    Raises OSError if it cannot be made, or belongs to someone else.
    """
    with suppress(FileExistsError):
        root.mkdir(mode=0o700, parents=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{root}: not a folder of this user")
    root.chmod(0o700)


def remove_unheld(root: Path, after: Iterable[int] = ()) -> None:
    """Delete the shares that no process holds. after: processes that are dying, waited for."""
    processes = []
    for pid in after:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    psutil.wait_procs(processes, timeout=_DIES_WITHIN_S)
    for lock in root.glob("*/*/*/lock"):
        with suppress(OSError):  # held, or deleted by another engine
            _remove(lock)
    for folder in (*root.glob("*/*"), *root.glob("*")):  # not the root: others could take its name
        with suppress(OSError):  # not empty
            folder.rmdir()


def _remove(lock: Path) -> None:
    claim = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for file in lock.parent.iterdir():
            if file != lock:
                file.unlink()
        lock.unlink()  # last: without it nobody would find the rest
        lock.parent.rmdir()
    finally:
        os.close(claim)
