"""Lets the threads that pass tokens on run as soon as they wake.

The compute threads of a stage use every core. A thread that wakes beside them waits until one of
them has used up its time slice (up to 4 ms, Linux 6.12 on two cores), unless its own slice is
shorter than theirs: then it runs at once. A short slice takes no larger share of a core.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from pathlib import Path
from typing import Final

SHORTEST_NS: Final = 100_000  # that Linux accepts
_ATTRIBUTES: Final = struct.Struct("IIQiIQQQ")  # struct sched_attr, first version
_RESET_ON_FORK: Final = 1  # flag: later threads and processes, which may compute, have usual slices
_SYSCALLS: Final = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr


def _syscalls() -> tuple[int, int] | None:
    return _SYSCALLS.get(platform.machine()) if sys.platform == "linux" else None


def shorten_time_slices() -> None:
    """Ask for the shortest time slice for every thread that this process has now.

    Needs no privilege. Linux before 6.12 ignores it, and other systems have nothing like it."""
    numbers = _syscalls()
    if numbers is None:
        return
    set_attributes, get_attributes = numbers
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    for thread in [int(task.name) for task in Path("/proc/self/task").iterdir()]:
        if syscall(get_attributes, thread, buffer, _ATTRIBUTES.size, 0) != 0:
            continue  # the thread has ended
        size, policy, flags, nice, priority, *_ = _ATTRIBUTES.unpack(buffer.raw)
        if policy == os.SCHED_OTHER:
            wanted = _ATTRIBUTES.pack(
                size, policy, flags | _RESET_ON_FORK, nice, priority, SHORTEST_NS, 0, 0
            )
            syscall(set_attributes, thread, wanted, 0)


def time_slice_ns(thread: int = 0) -> int:
    """The slice of a thread (0: the caller); 0 where the system does not tell."""
    numbers = _syscalls()
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if numbers is None or ctypes.CDLL(None).syscall(numbers[1], thread, buffer, len(buffer), 0):
        return 0
    return int(_ATTRIBUTES.unpack(buffer.raw)[5])
