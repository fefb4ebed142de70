"""Resources of an idle server: blocks, processes, files, memory. Comparing two shows leaks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import psutil

from app.bench.chaos.own_server import SERVING, OwnServer

_IDLE = ("num_waiting", "num_decoding", "num_prefilling", "num_finishing", "num_in_flight")
_MEMORY_SHARE, _MEMORY_BYTES = 0.10, 48 << 20  # a leak is more than both
_SPARE_FILES = 6  # a process started anew may hold a few more or less


@dataclass(frozen=True, slots=True)
class Census:
    """At rest. files: open file descriptors by kind of process. memory_bytes: private to them."""

    num_blocks: int
    num_free_blocks: int
    processes: Mapping[str, int]
    files: Mapping[str, int]
    memory_bytes: Mapping[str, int]
    shared_files: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def count(server: OwnServer) -> Census:
    """Raises httpx.HTTPError or ValueError where the server does not answer."""
    status = server.status()
    processes = server.processes()
    files, memory = dict[str, int](), dict[str, int]()
    for kind in SERVING:
        for process in processes.get(kind, []):
            with suppress(psutil.Error):
                files[kind] = files.get(kind, 0) + process.num_fds()
                memory[kind] = memory.get(kind, 0) + process.memory_full_info().uss
    return Census(
        num_blocks=status["num_blocks"],
        num_free_blocks=status["num_free_blocks"],
        processes={kind: len(found) for kind, found in sorted(processes.items())},
        files=files,
        memory_bytes=memory,
        shared_files=len(server.shared_files()),
        settings={key: status[key] for key in ("policy", "tbt_s", "ttft_s")},
    )


def settle(server: OwnServer, within_s: float = 60.0) -> None:
    """Until nothing is running, waiting or being started. Raises TimeoutError."""
    deadline_s = time.monotonic() + within_s
    last: object = None
    while time.monotonic() < deadline_s:
        try:
            status = server.status()
            last = {key: status[key] for key in (*_IDLE, "rebuilding", "standby")}
            is_rebuilding = status["rebuilding"] or status["standby"] == "starting"
            if not any(status[key] for key in _IDLE) and not is_rebuilding:
                return
        except (httpx.HTTPError, ValueError) as error:
            last = error
        time.sleep(0.2)
    raise TimeoutError(f"the server did not come to rest within {within_s:g} s: {last}")


def leaks(before: Census, after: Census) -> list[str]:
    """Resources held after but not before, in words."""
    found = []
    if after.num_free_blocks != after.num_blocks or after.num_blocks != before.num_blocks:
        found.append(f"{after.num_blocks - after.num_free_blocks} KV blocks are not free")
    for kind, count in after.processes.items():
        if count > before.processes.get(kind, 0):
            found.append(
                f"{count} processes of kind {kind}, {before.processes.get(kind, 0)} before"
            )
    for kind, count in after.files.items():
        if count > before.files.get(kind, 0) + _SPARE_FILES:
            found.append(f"the {kind} holds {count} files, {before.files.get(kind, 0)} before")
    for kind, size in after.memory_bytes.items():
        grown = size - before.memory_bytes.get(kind, 0)
        if grown > max(_MEMORY_BYTES, _MEMORY_SHARE * before.memory_bytes.get(kind, 0)):
            found.append(f"the {kind} holds {grown >> 20} MiB more than before")
    if after.shared_files > before.shared_files:
        more = after.shared_files - before.shared_files
        found.append(f"{more} more files in shared memory")
    if after.settings != before.settings:
        found.append(f"settings {dict(after.settings)}, before {dict(before.settings)}")
    return found


def settled_leaks(
    server: OwnServer, before: Census, within_s: float = 30.0
) -> tuple[list[str], Census]:
    """Leaks after a pause, in which ending processes may finish."""
    deadline_s = time.monotonic() + within_s
    while True:
        after = count(server)
        found = leaks(before, after)
        if not found or time.monotonic() > deadline_s:
            return found, after
        time.sleep(0.5)
