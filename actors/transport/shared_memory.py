"""One file in memory that all ranks of a stage have open, where all run on one machine.

Ranks on CPUs sum through it (`kernels.cpu.all_reduce`), because gloo would take most of a small
step's time. Parts are added in rank order, so that all ranks get the same bits; a waiting rank
sleeps on a futex and checks that its peer is alive. Without the file all use gloo.

Rank 0 creates it without a name, so it disappears with the last process that has it open. The
others open it through rank 0's entry in /proc, and check a token in it to be sure that it is the
same file.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NONE = b"-"
_TOKEN_BYTES = 16  # after the memory itself


def shared_file(store: Any, rank: int, size: int, num_bytes: int) -> int | None:
    """A descriptor of num_bytes zeros; None on every rank if any rank cannot open it.

    store: torch.distributed's, where ranks find each other. Every rank calls this once.
    """
    if rank == 0:
        fd = _create(store, num_bytes)
    else:
        fd = _open(store.get("shared/file").decode(), num_bytes)
    store.set(f"shared/{rank}", _NONE if fd is None else b"+")
    if all(store.get(f"shared/{r}") == b"+" for r in range(size)):
        return fd
    if fd is not None:
        os.close(fd)
    return None


def _create(store: Any, num_bytes: int) -> int | None:
    try:
        fd = os.memfd_create("legato-ranks", os.MFD_CLOEXEC)
        token = secrets.token_bytes(_TOKEN_BYTES)
        os.ftruncate(fd, num_bytes)
        os.pwrite(fd, token, num_bytes)
    except OSError:
        store.set("shared/file", _NONE)
        return None
    store.set("shared/file", f"{_boot_id()} {os.getpid()} {fd} {token.hex()}".encode())
    return fd


def _open(named: str, num_bytes: int) -> int | None:
    if named == _NONE.decode():
        return None
    boot_id, process, number, token = named.split(" ")
    if boot_id != _boot_id():
        return None
    try:
        fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        if os.pread(fd, _TOKEN_BYTES, num_bytes).hex() == token:
            return fd
        os.close(fd)
    except OSError:  # another container, or another user
        return None
    return None


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return "unknown"
