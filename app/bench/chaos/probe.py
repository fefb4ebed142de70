"""How long `/live` takes, asked again and again from a process of its own: the event loop's lag.

`python -m app.bench.chaos.probe URL [PID]` asks until its standard input ends, then prints what it
saw. On a busy machine much of that is waiting for a processor: the probe's own sleeps tell how
late this machine wakes a process, and what process PID, the replica, computed while an answer was
due is the part that is the server's own.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import select
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import psutil

from app.telemetry.definitions import quantile

_EVERY_S = 0.01
_LIMIT_S = 30.0


def spread_ms(values_s: list[float]) -> dict[str, float]:
    ordered = sorted(1000 * value for value in values_s)
    return {
        "p50": quantile(ordered, 0.5),
        "p99": quantile(ordered, 0.99),
        "p999": quantile(ordered, 0.999),
        "longest": quantile(ordered, 1.0),
    }


@asynccontextmanager
async def probing(url: str, pid: int | None = None) -> AsyncGenerator[dict[str, Any], None]:
    """Probes while the block runs; what was seen is in the dictionary once it has ended.

    pid: of the replica, where it runs on this machine."""
    found: dict[str, Any] = {}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.bench.chaos.probe", url),
        *([] if pid is None else [str(pid)]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield found
    finally:
        with suppress(ProcessLookupError):
            output, _ = await child.communicate(b"")
            found |= json.loads(output)


def computed_s(pid: int) -> float:
    """What all threads of a process have computed; the clock of it ticks every 10 ms."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def probe(url: str, pid: int | None) -> dict[str, Any]:
    """Until the standard input ends."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=_LIMIT_S)
    answers_s, sleeps_s, failures = list[float](), list[float](), list[str]()
    works_s = list[float]()
    while True:
        asleep_s = time.perf_counter()
        if select.select([sys.stdin], [], [], _EVERY_S)[0]:
            break
        asked_s = time.perf_counter()
        sleeps_s.append(asked_s - asleep_s - _EVERY_S)
        before_s = 0.0 if pid is None else computed_s(pid)
        try:
            connection.request("GET", "/live")
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                failures.append(f"status {answer.status}")
        except (OSError, http.client.HTTPException) as error:
            failures.append(repr(error))
            connection.close()
        answers_s.append(time.perf_counter() - asked_s)
        if pid is not None:
            works_s.append(computed_s(pid) - before_s)
    return {
        "num": len(answers_s),
        "ms": spread_ms(answers_s),
        "own_wakeups_late_ms": spread_ms(sleeps_s),
        "replica_work_ms": spread_ms(works_s) if works_s else None,
        "failures": failures[:10],
        "num_failures": len(failures),
    }


if __name__ == "__main__":
    json.dump(probe(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else None), sys.stdout)
