"""A day of a hundred engines: what scaling on slack costs beside Ray Serve's default.

    legato simulate --study scaling [--replicas 100] [--out FOLDER]

Token by token a day of a hundred engines is hours of simulation. But engines behind a balancing
router are alike, so one engine is simulated in full at a few loads, which gives a *response
surface*: what scaling is shown of it, and which share of its requests keep their objectives. The
day then goes in steps of ten seconds: Poisson traffic that follows the clock, with rushes; engines
share it evenly; what exceeds their rate waits and is worked off later. The scaling policies are
those of `actors.fleet`, asked every ten seconds, and an engine serves a minute after it was asked
for. What is lost are differences between engines, and transients shorter than a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from actors.fleet.scaling import Bounds, EngineLoad, Scaling, build_scaling
from app.simulate.hardware.deployments import load_model
from app.simulate.run.processes import each
from app.simulate.run.simulation import Autoscale, Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.requests import generate
from app.simulate.workload.specs import parse_lengths

MODEL = "yi-34b-a100-tp2"
TBT_S = 0.2
# Traffic: (loads of one engine, TTFT objective).
TRAFFIC: dict[str, tuple[tuple[float, ...], float]] = {
    "sharegpt4": ((0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4), 5.0),
    "arxiv": ((0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45), 10.0),
}
STEP_S, START_S, DAY_S = 10.0, 60.0, 86_400.0
RUSHES_H = (3.0, 9.5, 13.0, 18.5)  # when half as much again comes for twenty minutes
TARGETS = {
    "slack": (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6),
    "queue_length": (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0, 40.0),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One engine at one load. kept: share of requests that kept both objectives."""

    qps: float
    kept: float
    prompt_tokens: float
    load: EngineLoad


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """A day under one policy. hours: of engines. kept: share of the day's requests."""

    traffic: str
    scaling: str
    target: float
    hours: float
    kept: float
    least: int
    most: int
    changes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def surface(traffic: str, num_requests: int = 400, seed: int = 0, workers: int = 1) -> list[Point]:
    """One engine in full at each load; the first fifth is not counted."""
    jobs = [(traffic, qps, num_requests, seed) for qps in TRAFFIC[traffic][0]]
    return each(point_at, jobs, workers)


def point_at(dataset: str, qps: float, num_requests: int, seed: int) -> Point:
    """One engine at one load."""
    limit_s = TRAFFIC[dataset][1]
    model = load_model(MODEL)
    config = scheduler_config(model, budget="adaptive", tbt_s=TBT_S, ttft_s=limit_s)
    looks = Autoscale("slack", bounds=Bounds(1, 1), interval_s=STEP_S)
    traffic = generate(poisson(qps), parse_lengths(dataset), num_requests, seed)
    run = simulate(traffic, Deployment(config, model, autoscale=looks))
    record, skip = run.record, num_requests // 5
    ttft_s = (np.array(record.first_token_s) - np.array(record.arrival_s))[skip:]
    gap_s = np.array(record.max_gap_s)[skip:]
    kept = (ttft_s <= limit_s) & (gap_s <= TBT_S * (1 + 1e-9))
    last = int(traffic.arrival_s[-1] / STEP_S)
    seen = [next(iter(loads.values())) for loads in run.loads[last // 5 : last]]
    mean = {
        f.name: float(np.mean([getattr(load, f.name) for load in seen])) for f in fields(EngineLoad)
    }
    return Point(qps, float(kept.mean()), float(traffic.prompt_tokens.mean()), EngineLoad(**mean))


def at_load(points: Sequence[Point], qps: float) -> Point:
    """Interpolated between the two nearest loads; the ends are held."""
    loads = [point.qps for point in points]
    index = int(np.searchsorted(loads, qps))
    if index in (0, len(points)):
        return points[min(index, len(points) - 1)]
    low, high = points[index - 1], points[index]
    part = (qps - low.qps) / (high.qps - low.qps)
    mixed = {
        f.name: getattr(low.load, f.name)
        + part * (getattr(high.load, f.name) - getattr(low.load, f.name))
        for f in fields(EngineLoad)
    }
    return Point(
        qps, low.kept + part * (high.kept - low.kept), low.prompt_tokens, EngineLoad(**mixed)
    )


def traffic_qps(num_engines: int, safe_qps: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Load by step: least at night, and rushes that rise within five minutes."""
    time_s = np.arange(0.0, DAY_S, STEP_S)
    day = 1.0 - 0.6 * np.cos(2.0 * math.pi * time_s / DAY_S)
    rush = np.ones_like(day)
    for hour in RUSHES_H:
        into_s = time_s - 3600.0 * hour
        rush += 0.5 * np.clip(np.minimum(into_s, 1500.0 - into_s) / 300.0, 0.0, 1.0)
    shape = day * rush
    return shape * (num_engines * safe_qps / shape.max())


def run_day(
    points: Sequence[Point], scaling: Scaling, num_engines: int, saturated_qps: float, seed: int
) -> tuple[float, float, list[int]]:
    """(engine hours, share of requests that kept their objectives, engines by step)."""
    rng, bounds = np.random.default_rng(seed), Bounds(1, num_engines)
    load_qps = traffic_qps(num_engines, 0.8 * saturated_qps)
    first = math.ceil(load_qps[0] / (0.6 * saturated_qps))
    names, starting = [f"engine-{index}" for index in range(first)], list[float]()
    num_named = first
    prefilled = backlog = hours = kept = total = 0.0
    history = []
    for step, qps in enumerate(load_qps.tolist()):
        now_s = step * STEP_S
        ready = sum(at_s <= now_s for at_s in starting)
        starting = starting[ready:]
        names += [f"engine-{num_named + index}" for index in range(ready)]
        num_named += ready
        have = len(names)
        history.append(have)
        hours += (have + len(starting)) * STEP_S / 3600.0
        arrived = float(rng.poisson(qps * STEP_S))
        room = have * saturated_qps * STEP_S
        served = min(backlog + arrived, room)
        point = at_load(points, served / STEP_S / have)
        wait_s = backlog / (have * saturated_qps)
        kept += arrived * (point.kept if wait_s < point.load.ttft_s / 2 else 0.0)
        total += arrived
        backlog += arrived - served
        prefilled += served / have * point.prompt_tokens  # of an engine that is there all day
        load = replace(
            point.load,
            time_s=now_s + STEP_S,
            num_waiting=point.load.num_waiting + backlog / have,
            prefilled_tokens=prefilled,
            prefill_tokens=point.load.prefill_tokens + backlog / have * point.prompt_tokens,
            promised_s=point.load.promised_s + backlog / (have * saturated_qps),
        )
        loads = dict.fromkeys(names, load)
        wanted = scaling.wanted(loads, len(starting), 0, now_s + STEP_S, bounds)
        starting += [now_s + STEP_S + START_S] * (wanted - have - len(starting))
        if wanted < have and not starting:
            del names[wanted:]
    return hours, kept / total, history


def study(num_engines: int = 100, seed: int = 0, workers: int = 1) -> Iterator[ScalingRow]:
    """Rows of each policy under each target, by traffic. workers: processes for the surface."""
    for traffic in TRAFFIC:
        points = surface(traffic, seed=seed, workers=workers)
        saturated_qps = max([point.qps for point in points if point.kept >= 0.9])
        for name, targets in TARGETS.items():
            for target in targets:
                scaling = build_scaling(name, {"target": target})
                hours, kept, history = run_day(points, scaling, num_engines, saturated_qps, seed)
                changes = sum(a != b for a, b in pairwise(history))
                yield ScalingRow(
                    traffic, name, target, hours, kept, min(history), max(history), changes
                )


def as_markdown(rows: list[ScalingRow]) -> str:
    lines = [
        "| traffic | policy | target | engine hours | kept | engines | changes |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.traffic} | {row.scaling} | {row.target:g} | {row.hours:.0f} | {row.kept:.2%} "
        f"| {row.least} to {row.most} | {row.changes} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
