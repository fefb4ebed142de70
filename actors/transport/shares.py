"""Where the engines of a node keep the KV that they share, and what becomes of it when they die.

A share is a folder that its rank holds by a lock, which ends with the process: so a share that
nobody holds was left by a rank that died. Engines delete such shares as they start and as they end;
until then its peers may read it. Layout: ROOT/MODEL/RANK/SHARE.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")
_DIES_WITHIN_S = 8.0  # Ray waits five seconds for a stopped process before it kills it


def shares_root(folder: Path = MEMORY) -> Path:
    """The root of this user's shares in a folder that others may write to."""
    return folder / f"legato-{os.geteuid()}"


def make_private(root: Path) -> None:
    """Make the root, which nobody else may enter: blocks tell of prompts, and are believed.

    Raises OSError if it cannot be made, or belongs to someone else.
    """
    with suppress(FileExistsError):
        root.mkdir(mode=0o700, parents=True)
    if not _is_own_folder(root):
        raise PermissionError(f"{root}: not a folder of this user")
    root.chmod(0o700)


def _is_own_folder(path: Path) -> bool:
    found = path.lstat()  # no link is followed: somebody else may have made it
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def remove_unheld(root: Path, after: Sequence[psutil.Process] = ()) -> None:
    """Delete the shares that no process holds, if the root is this user's own folder.

    after: processes of this node that are dying, waited for."""
    psutil.wait_procs(after, timeout=_DIES_WITHIN_S)
    for model in _own_folders(root):
        for rank in _own_folders(model):
            for share in _own_folders(rank):
                with suppress(OSError):  # held, or deleted by another engine
                    _remove(share / "lock")
            with suppress(OSError):  # not empty
                rank.rmdir()
        with suppress(OSError):
            model.rmdir()  # but not the root: others could take its name


def _own_folders(folder: Path) -> list[Path]:
    with suppress(OSError):  # there is none
        if _is_own_folder(folder):
            return [path for path in sorted(folder.iterdir()) if _is_own_folder(path)]
    return []


def _remove(lock: Path) -> None:
    claim = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(claim), lock.lstat()):
            return  # it was deleted and made anew in the meantime, and is held
        for file in lock.parent.iterdir():
            if file != lock:
                file.unlink()
        lock.unlink()  # last: without it nobody would find the rest
        lock.parent.rmdir()
    finally:
        os.close(claim)
