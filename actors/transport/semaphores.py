"""Removes the names of semaphores that Ray's channels leave in shared memory.

Ray gives each channel two, named after the raylet, and removes the names only if a graph is
torn down in order; stages that die, or are killed, leave sixteen files behind each time, as does a
server that ends. An open semaphore is mapped, and does not need its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

_FOLDER = Path("/dev/shm")
_NAME: Final = re.compile(r"sem\.(?:hdr|obj)(\d+)-\d+")  # with the raylet's process id
_MAPPED: Final = re.compile(rb" (\d+) +/dev/shm/sem\.")  # the inode of a line of /proc/.../maps


def mapped_by(pids: Iterable[int]) -> set[int]:
    """Inodes of the semaphores that these processes of this machine have open."""
    found: set[int] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended, or there is no /proc
            found |= {int(i) for i in _MAPPED.findall(Path(f"/proc/{pid}/maps").read_bytes())}
    return found


def remove(inodes: set[int]) -> None:
    """Remove the names of these."""
    for path, inode, _ in _names():
        if inode in inodes:
            _unlink(path)


def remove_orphans(raylet: int | None = None) -> None:
    """Remove this user's unneeded names: those of raylets that have ended, and those of `raylet`
    that none of its workers has open, because their engine has ended.

    A semaphore is mapped before it has a name, so one that is being made is never among them.
    """
    names = _names()
    own = [(path, inode) for path, inode, maker in names if maker == raylet]
    mapped = set[int]()
    if raylet is not None and own:
        mapped = mapped_by([*_children(raylet), *_children(os.getppid())])  # forks among them
    left = [path for path, inode in own if inode not in mapped]
    left += [path for path, _, maker in names if maker != raylet and not psutil.pid_exists(maker)]
    for path in left:
        _unlink(path)


def own_raylet() -> int:
    """The raylet of this worker, as Ray tells it: its parent may be a process that forks for it."""
    return int(os.environ.get("RAY_RAYLET_PID", os.getppid()))


def _unlink(path: Path) -> None:
    with suppress(OSError):  # gone meanwhile
        path.unlink()


def _names() -> list[tuple[Path, int, int]]:
    """This user's: path, inode, and the raylet's process id."""
    found = []
    with suppress(OSError), os.scandir(_FOLDER) as entries:  # no such folder: nothing to do
        for entry in entries:
            if (name := _NAME.fullmatch(entry.name)) is not None:
                with suppress(OSError):  # gone meanwhile
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        found.append((Path(entry.path), entry.inode(), int(name[1])))
    return found


def _children(parent: int) -> list[int]:
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(parent).children()]
    return []
