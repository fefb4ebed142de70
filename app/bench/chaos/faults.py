"""Faults of a server's processes, files and memory, each one row of `FAULTS`.

A fault strikes, holds for a while, and is lifted; what it killed stays dead. Nothing here is told
to the server: the faults are those of an operating system under duress.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.bench.chaos.own_server import OwnServer

_MIB = 1 << 20
_APPEARS_WITHIN_S = 20.0
_FILL_AT_MOST_MIB = 4096  # a larger disk or shared memory is not this server's alone
Lift = Callable[[], None]


class Skipped(Exception):
    """The fault cannot be injected here; the message says why."""


def nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Fault:
    """strike: makes it and returns what lifts it. hold_s: the least and most it lasts.
    weight: how often it comes, beside the others."""

    strike: Callable[[OwnServer, random.Random], Lift]
    hold_s: tuple[float, float] = (0.0, 0.0)
    weight: int = 1


def _one(server: OwnServer, kind: str, chance: random.Random) -> int:
    """One of its kind; while none runs, it is about to be started."""
    deadline_s = time.monotonic() + _APPEARS_WITHIN_S
    while not (pids := server.pids(kind)):
        if time.monotonic() > deadline_s:
            raise Skipped(f"no {kind} runs")
        time.sleep(0.1)
    return chance.choice(pids)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def killed(kind: str) -> Callable[[OwnServer, random.Random], Lift]:
    def strike(server: OwnServer, chance: random.Random) -> Lift:
        _signal(_one(server, kind, chance), signal.SIGKILL)
        return nothing

    return strike


def frozen(kind: str) -> Callable[[OwnServer, random.Random], Lift]:
    """Stopped for good: the server must notice."""

    def strike(server: OwnServer, chance: random.Random) -> Lift:
        _signal(_one(server, kind, chance), signal.SIGSTOP)
        return nothing

    return strike


def _paused(kind: str) -> Callable[[OwnServer, random.Random], Lift]:
    def strike(server: OwnServer, chance: random.Random) -> Lift:
        pid = _one(server, kind, chance)
        _signal(pid, signal.SIGSTOP)
        return lambda: _signal(pid, signal.SIGCONT)

    return strike


def _limited(kind: str, limit: int, room: Callable[[int], int]) -> Callable[..., Lift]:
    """The process gets no more of something than it has. room: the limit, by its process id."""

    def strike(server: OwnServer, chance: random.Random) -> Lift:
        pid = _one(server, kind, chance)
        try:
            before = resource.prlimit(pid, limit)
            resource.prlimit(pid, limit, (room(pid), before[1]))
        except (OSError, psutil.Error) as error:
            raise Skipped(f"the {kind}'s limits cannot be set: {error}") from error

        def lift() -> None:
            with suppress(OSError):  # it has ended
                resource.prlimit(pid, limit, before)

        return lift

    return strike


def _address_space(pid: int) -> int:
    return psutil.Process(pid).memory_info().vms + _MIB


def _open_files(pid: int) -> int:
    return max((int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()), default=0) + 1


def _full(where: Callable[[OwnServer], Path], then_kill: str) -> Callable[..., Lift]:
    """The file system is filled, and then a process killed that must come back all the same."""

    def strike(server: OwnServer, chance: random.Random) -> Lift:
        pid = _one(server, then_kill, chance)
        filler = _fill(where(server))
        _signal(pid, signal.SIGKILL)
        return lambda: filler.unlink(missing_ok=True)

    return strike


def _fill(folder: Path) -> Path:
    if not folder.is_dir():
        raise Skipped("the server's files cannot be seen from here")
    free = os.statvfs(folder)
    if free.f_blocks * free.f_frsize > _FILL_AT_MOST_MIB * _MIB:
        raise Skipped("no file system of its own: `unshare` makes none here")
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(_MIB))
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))
    return filler


def _telemetry(server: OwnServer) -> Path:
    return server.root / server.telemetry.relative_to("/")


def _shared_memory(server: OwnServer) -> Path:
    if server.shared_memory is None:
        raise Skipped("the machine's shared memory is not this server's alone")
    return Path(f"/proc/self/fd/{server.shared_memory}")


_SHORT, _LONG = (0.5, 2.0), (2.0, 5.0)
FAULTS: Mapping[str, Fault] = {
    "stage killed": Fault(killed("stage"), weight=4),
    "standby killed": Fault(killed("standby")),
    "scheduler killed": Fault(killed("scheduler"), weight=2),
    "stage frozen": Fault(frozen("stage")),
    "scheduler frozen": Fault(frozen("scheduler")),
    "stage paused": Fault(_paused("stage"), _SHORT, weight=2),
    "scheduler paused": Fault(_paused("scheduler"), _SHORT, weight=2),
    "replica paused": Fault(_paused("replica"), _SHORT, weight=2),
    "controller killed": Fault(killed("controller")),
    "controller paused": Fault(_paused("controller"), _LONG),
    "grammar worker killed": Fault(killed("grammar worker"), weight=2),
    "template worker killed": Fault(killed("template worker"), weight=2),
    "template worker frozen": Fault(frozen("template worker")),
    "stage killed on a full disk": Fault(_full(_telemetry, "stage"), _LONG),
    "scheduler killed on a full disk": Fault(_full(_telemetry, "scheduler"), _LONG),
    "no memory for the stage": Fault(
        _limited("stage", resource.RLIMIT_AS, _address_space), _LONG, weight=2
    ),
    "no memory for the scheduler": Fault(
        _limited("scheduler", resource.RLIMIT_AS, _address_space), _LONG
    ),
    "no files for the replica": Fault(
        _limited("replica", resource.RLIMIT_NOFILE, _open_files), _LONG
    ),
    "no files for the scheduler": Fault(
        _limited("scheduler", resource.RLIMIT_NOFILE, _open_files), _LONG
    ),
    "stage killed in full shared memory": Fault(_full(_shared_memory, "stage"), _LONG),
}


def deck(
    kinds: Sequence[str], chance: random.Random, faults: Mapping[str, Fault] = FAULTS
) -> list[str]:
    """Kinds by their weight, in an order drawn by chance."""
    cards = [kind for kind in kinds for _ in range(faults[kind].weight)]
    chance.shuffle(cards)
    return cards


def strike(fault: Fault, server: OwnServer, chance: random.Random) -> tuple[float, Lift]:
    """Seconds that it shall hold, and what lifts it. Raises Skipped."""
    return chance.uniform(*fault.hold_s), fault.strike(server, chance)
