"""CPU time of Legato's processes on this machine, by kind."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

# Part of a process's command line -> what it is. Everything else of Ray's is "ray".
_KINDS = (
    ("ray::ServeReplica:legato:Front", "front"),
    ("ray::ServeReplica", "replica"),  # a lone one, or the owner of a fleet's engine
    ("ray::SchedulerActor", "scheduler"),
    ("ray::StageActor", "stage"),
    ("haproxy", "haproxy"),
    ("legato serve", "driver"),
    ("ray::", "ray"),
    ("raylet", "ray"),
    ("gcs_server", "ray"),
    ("/ray/", "ray"),
)


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU seconds by kind of process, and the seconds over which they were used."""

    cpu_s: dict[str, float]
    span_s: float

    def percent(self, kind: str) -> float:
        """CPU use in percent of one core.

        >>> CpuUsage({"stage": 0.5}, span_s=2.0).percent("stage")
        25.0
        """
        return 100 * self.cpu_s.get(kind, 0.0) / self.span_s

    def percents(self) -> dict[str, float]:
        return {kind: self.percent(kind) for kind in self.cpu_s}


class CpuMeter:
    """Measures the CPU time used since its construction."""

    def __init__(self) -> None:
        self._begin_s, self._begin = time.monotonic(), _cpu_by_kind()

    def read(self) -> CpuUsage:
        now = _cpu_by_kind()
        span_s = time.monotonic() - self._begin_s
        return CpuUsage({k: now[k] - self._begin.get(k, 0.0) for k in now}, span_s)


def wait_until_idle(limit_s: float = 120.0) -> None:
    """Wait until the stages rest: after its start one still clears KV memory, on idle cores."""
    give_up_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_s:
        meter = CpuMeter()
        time.sleep(1.0)
        if meter.read().percent("stage") < 5.0:
            return


def _cpu_by_kind() -> dict[str, float]:
    usage: dict[str, float] = {}
    for process in psutil.process_iter():
        try:
            title = " ".join(process.cmdline())
            times = process.cpu_times()
        except psutil.Error:
            continue  # it ended meanwhile
        kind = next((kind for mark, kind in _KINDS if mark in title), None)
        if kind is not None:
            usage[kind] = usage.get(kind, 0.0) + times.user + times.system
    return usage
