"""How long `/live` takes, asked again and again from a process of its own: the event loop's lag.

`python -m app.bench.chaos.probe URL` asks until its standard input ends, then prints what it saw.
Its own sleeps tell how late this machine wakes anybody: what a process that waits for nothing
but the processor suffers is no fault of the server's.
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
async def probing(url: str) -> AsyncGenerator[dict[str, Any], None]:
    """Probes while the block runs; what was seen is in the dictionary once it has ended."""
    found: dict[str, Any] = {}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.bench.chaos.probe", url),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield found
    finally:
        with suppress(ProcessLookupError):
            output, _ = await child.communicate(b"")
            found |= json.loads(output)


def probe(url: str) -> dict[str, Any]:
    """Until the standard input ends."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=_LIMIT_S)
    answers_s, sleeps_s, failures = list[float](), list[float](), list[str]()
    while True:
        asleep_s = time.perf_counter()
        if select.select([sys.stdin], [], [], _EVERY_S)[0]:
            break
        asked_s = time.perf_counter()
        sleeps_s.append(asked_s - asleep_s - _EVERY_S)
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
    return {
        "num": len(answers_s),
        "ms": spread_ms(answers_s),
        "own_wakeups_late_ms": spread_ms(sleeps_s),
        "failures": failures[:10],
        "num_failures": len(failures),
    }


if __name__ == "__main__":
    json.dump(probe(sys.argv[1]), sys.stdout)
