"""Routing of a large fleet: what is missed under each router, on conversations and on documents.

    legato simulate --study routing [--replicas 64] [--routing prefix,slack] [--workers 2]
    legato bench routers [--engines 64] [--seeds 10,11,12]     # over several seeds, with a report

All engines are alike (Yi-34B on two A100s, adaptive budget, prefix cache), all routers see the same
arrivals and the same snapshots, four a second and 20 ms old. A request is missed if its first token
comes after the TTFT objective or a later one after the TBT objective. The first part of each run,
while caches fill, is not counted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from actors.fleet.routers import ROUTERS
from app.simulate.hardware.deployments import load_model
from app.simulate.run.processes import in_order
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.requests import Workload, about_documents, multi_turn
from app.simulate.workload.specs import parse_lengths

MODEL = "yi-34b-a100-tp2"
TBT_S = 0.2
SKIPPED_SHARE = 0.4  # of the requests, while caches fill


def conversations(num_engines: int, rate: float, seconds: float, seed: int) -> Workload:
    """Six turns on average, twenty seconds apart; `rate` turns a second and engine."""
    qps = rate * num_engines / 6.0
    whole = multi_turn(qps, 6.0, parse_lengths("sharegpt4/4"), int(qps * seconds), 20.0, 8192, seed)
    count = int(np.searchsorted(whole.arrival_s, seconds))  # what comes later is a tail
    return Workload(
        whole.arrival_s[:count],
        whole.prompt_tokens[:count],
        whole.output_tokens[:count],
        whole.sessions[:count],
        whole.shared_tokens[:count],
        name="conversations",
    )


def documents(num_engines: int, rate: float, seconds: float, seed: int) -> Workload:
    """Questions about twenty papers an engine, some asked for more than others."""
    qps = rate * num_engines
    return about_documents(
        poisson(qps), parse_lengths("arxiv"), 20 * num_engines, int(qps * seconds), seed=seed
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """draw: (engines, rate, seconds, seed) -> workload. rates: loads per engine that are tried."""

    draw: Callable[[int, float, float, int], Workload]
    rates: tuple[float, ...]
    ttft_s: float


TRACES = {
    "conversations": Traffic(conversations, (10.0, 11.0), 2.0),
    "documents": Traffic(documents, (0.9, 1.3), 5.0),
}


@dataclass(frozen=True, slots=True)
class RoutingRow:
    """One run. Shares are of the requests that count; rate is per engine and second."""

    trace: str
    rate: float
    routing: str
    seed: int
    num_requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    missed: float
    late: float
    slow: float
    cached: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def run_one(
    trace: str, rate: float, routing: str, num_engines: int, seconds: float, seed: int
) -> RoutingRow:
    """Simulate one router under one load."""
    workload = TRACES[trace].draw(num_engines, rate, seconds, seed)
    limit_s = TRACES[trace].ttft_s
    model = load_model(MODEL)
    config = scheduler_config(
        model, budget="adaptive", tbt_s=TBT_S, ttft_s=limit_s, prefix_cache=True
    )
    deployment = Deployment(config, model, num_replicas=num_engines, routing=routing)
    gc.disable()  # millions of live records and no cycles worth finding
    try:
        record = simulate(workload, deployment).record
    finally:
        gc.enable()
    skip = int(SKIPPED_SHARE * len(workload))
    ttft_s = (np.array(record.first_token_s) - np.array(record.arrival_s))[skip:]
    late = ~(ttft_s <= limit_s)
    slow = np.array(record.max_gap_s)[skip:] > TBT_S * (1 + 1e-9)
    return RoutingRow(
        trace,
        rate,
        routing,
        seed,
        len(workload) - skip,
        float(np.nanquantile(ttft_s, 0.5)),
        float(np.nanquantile(ttft_s, 0.99)),
        float((late | slow).mean()),
        float(late.mean()),
        float(slow.mean()),
        float(sum(record.num_cached_tokens[skip:]) / workload.prompt_tokens[skip:].sum()),
    )


def study(
    num_engines: int = 64,
    seconds: float = 80.0,
    seed: int = 0,
    workers: int = 1,
    routers: Sequence[str] = tuple(ROUTERS),
    traces: Sequence[str] = tuple(TRACES),
) -> Iterator[RoutingRow]:
    """Simulate each router under every load of every trace; yields rows as they complete."""
    for kind, names, known in (("router", routers, ROUTERS), ("trace", traces, TRACES)):
        if unknown := set(names) - set(known):
            raise ValueError(f"unknown {kind} {min(unknown)!r}; known: {', '.join(known)}")
    jobs = [
        (trace, rate, routing, num_engines, seconds, seed)
        for trace in traces
        for rate in TRACES[trace].rates
        for routing in routers
    ]
    return in_order(run_one, jobs, workers)


def as_markdown(rows: list[RoutingRow]) -> str:
    lines = [
        "| trace | requests/s and engine | router | P50 TTFT, s | P99 TTFT, s | missed | late |"
        " slow | cached |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.trace} | {row.rate:g} | {row.routing} | {row.ttft_p50_s:.2f} "
        f"| {row.ttft_p99_s:.2f} | {row.missed:.2%} | {row.late:.2%} | {row.slow:.2%} "
        f"| {row.cached:.0%} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
