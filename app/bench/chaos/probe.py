"""How long `/live` takes, asked again and again from a process of its own, and the replica's lag.

`python -m app.bench.chaos.probe URL` asks until its standard input ends, then prints what it saw.
On a busy machine much of that is waiting for a processor: the probe's own sleeps tell how late this
machine wakes a process, and the replica's own measure of its event loop, from `/metrics`, is the
part that is the server's.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import select
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from app.bench.load.client import ask
from app.bench.report import MeasurementError
from app.paths import own_command, own_environment
from app.telemetry.definitions import quantile
from app.telemetry.loop_lag import TICK_S

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


@dataclass(frozen=True, slots=True)
class LagReading:
    """A replica's event-loop lag since its start. num_by_bound_s: late ticks by the
    upper bound of their bucket. run_delay_s: waits of the loop's thread for a core."""

    num_by_bound_s: Mapping[float, int]
    run_delay_s: float


def read_lag(url: str, headers: Mapping[str, str]) -> LagReading | None:
    """None of a server whose `/metrics` lack it. Raises MeasurementError where nothing
    answers."""
    try:
        answer = ask(f"{url}/metrics", _LIMIT_S, headers)
    except httpx.HTTPError as error:
        raise MeasurementError(f"{url}/metrics: {error}") from error
    found = read_samples(answer.text) if answer.is_success else None
    return found if found and found.num_by_bound_s else None


def read_samples(text: str) -> LagReading:
    """Parse a reading from a Prometheus exposition."""
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    name, counts, below = "legato_event_loop", dict[float, int](), 0
    for sample in samples:
        if sample.name == f"{name}_lag_seconds_bucket":
            counts[float(sample.labels["le"])] = int(sample.value) - below
            below = int(sample.value)
    delays = (s.value for s in samples if s.name == f"{name}_run_delay_seconds_total")
    return LagReading(counts, sum(delays))


def lag_between(before: LagReading, after: LagReading) -> dict[str, Any]:
    """at_most_ms: the upper bound of the longest pause between two ticks; None: of several s."""
    late = {b: n - before.num_by_bound_s[b] for b, n in after.num_by_bound_s.items()}
    longest_s = max((bound for bound, num in late.items() if num), default=0.0)
    return {
        "num_ticks": sum(late.values()),
        "late_ticks_by_ms": {f"{1000 * bound:g}": num for bound, num in late.items()},
        "at_most_ms": None if longest_s == math.inf else 1000 * (longest_s + TICK_S),
        "waited_for_core_s": after.run_delay_s - before.run_delay_s,
    }


@asynccontextmanager
async def probing(
    url: str, headers: Mapping[str, str] = MappingProxyType({})
) -> AsyncGenerator[dict[str, Any], None]:
    """Probes while the block runs; what was seen is in the dictionary once it has ended.

    headers: for `/metrics`, where the server asks for a key. loop_lag: as in `lag_between`; None if
    the server does not report it.
    """
    found: dict[str, Any] = {}
    before = await asyncio.to_thread(read_lag, url, headers)
    child = await asyncio.create_subprocess_exec(
        *own_command("app.bench.chaos.probe", url),
        env=own_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield found
    finally:
        with suppress(ProcessLookupError):
            output, _ = await child.communicate(b"")
            found |= json.loads(output)
        after = await asyncio.to_thread(read_lag, url, headers)
        found["loop_lag"] = lag_between(before, after) if before and after else None


def probe(url: str) -> dict[str, Any]:
    """Probe until the standard input ends."""
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
