"""Semaphores of Ray's channels in shared memory: their names outlive a pipeline that is killed.

Ray gives each channel two, named after the raylet, and takes the names away only where a graph is
torn down in order; stages that die, or are killed, leave sixteen files behind each time. Whoever
has opened a semaphore has it mapped, and needs its name no more. This is for raylets that live;
`actors.left_behind` clears up after those that have ended.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")
_PREFIXES = ("sem.hdr", "sem.obj")
_MAPPED = re.compile(rb" (\d+) +/dev/shm/sem\.")  # the inode of a line of /proc/.../maps


def mapped_by(pids: Iterable[int]) -> set[int]:
    """Inodes of the semaphores that these processes of this machine have open."""
    found: set[int] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended, or there is no /proc
            found |= {int(i) for i in _MAPPED.findall(Path(f"/proc/{pid}/maps").read_bytes())}
    return found


def remove(inodes: set[int]) -> None:
    """Take away the names of these."""
    for path, inode in _names(*_PREFIXES):
        if inode in inodes:
            _unlink(path)


def remove_orphans(raylet: int) -> None:
    """Names of this raylet's channels that none of its workers has open: their engine is gone.

    A semaphore is mapped before it has a name, so one that is being made is never among them.
    """
    orphans = _names(*[f"{prefix}{raylet}-" for prefix in _PREFIXES])
    mapped = mapped_by(_children(raylet)) if orphans else set()
    for path, inode in orphans:
        if inode not in mapped:
            _unlink(path)


def _unlink(path: Path) -> None:
    with suppress(OSError):  # gone meanwhile, or another user's
        path.unlink()


def _names(*prefixes: str) -> list[tuple[Path, int]]:
    found = []
    with suppress(OSError), os.scandir(_FOLDER) as entries:
        for entry in entries:
            if entry.name.startswith(prefixes):
                with suppress(OSError):  # gone meanwhile, or another user's
                    found.append((Path(entry.path), entry.inode()))
    return found


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                # The name, in brackets, may hold anything; state and parent follow it.
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(entry.name))
    return found
