"""A day of a large fleet, in seconds: the worked example of 1000 replicas.

    python -m app.simulate.studies.day [--replicas 1000] [--model yi-34b-a100-tp2] [--json]

A thousand replicas serve tens of millions of requests a day: token by token that is a day of
simulation too. But replicas behind a balanced router are alike, each seeing its share of the
traffic as a Poisson process, and minutes are long against requests. So one replica is simulated in
full at a few loads (every token, the real core), which gives a *response surface*: TTFT and TBT
distributions by load. The day then walks minute by minute: traffic follows the clock, the fleet
follows the traffic with a delay, and each minute's requests draw from the surface at its load. The
surface is exact where it was sampled; what is lost are transients shorter than a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from app.simulate.hardware.deployments import load_model
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import Lengths
from app.simulate.workload.requests import generate
from app.simulate.workload.specs import parse_lengths

Floats = NDArray[np.float64]

# Enough points to read a P99.9 off a distribution.
GRID = np.concatenate([np.arange(0.0005, 0.99, 0.001), np.arange(0.99, 1.0, 0.0001)])


@dataclass(frozen=True, slots=True)
class Response:
    """One replica's behavior at one load: quantiles of TTFT and TBT at `GRID`."""

    qps: float
    ttft_s: Floats
    tbt_s: Floats
    tokens_per_request: float


@dataclass(frozen=True, slots=True)
class Day:
    """Totals of a day. violations are shares of tokens (TBT) and requests (TTFT)."""

    num_requests: float
    output_tokens: float
    replica_hours: float
    peak_replicas: int
    least_replicas: int
    ttft_p50: float
    ttft_p99: float
    tbt_p50: float
    tbt_p99: float
    tbt_violations: float
    minutes_overloaded: int

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def respond(
    model: CostModel,
    config: SchedulerConfig,
    lengths: Lengths,
    loads_qps: Sequence[float],
    num_requests: int = 400,
    seed: int = 0,
) -> list[Response]:
    """Simulate one replica at each load, leaving out the first fifth as ramp-up."""
    surface = []
    for qps in loads_qps:
        workload = generate(poisson(qps), lengths, num_requests, seed=seed)
        record = simulate(workload, Deployment(config, model)).record
        skip = num_requests // 5
        arrival = np.array(record.arrival_s)[skip:]
        ttft = np.array(record.first_token_s)[skip:] - arrival
        gaps = np.frombuffer(record.gaps_s, np.float64)
        gaps = gaps[len(gaps) // 5 :]
        surface.append(
            Response(
                qps,
                np.quantile(ttft, GRID),
                np.quantile(gaps, GRID),
                float(workload.output_tokens.mean()),
            )
        )
    return surface


def at_load(surface: Sequence[Response], qps: float) -> Response:
    """Interpolate every quantile between the two nearest loads (ends are held)."""
    loads = [r.qps for r in surface]
    index = int(np.searchsorted(loads, qps))
    if index == 0:
        return surface[0]
    if index == len(surface):
        return surface[-1]
    low, high = surface[index - 1], surface[index]
    part = (qps - low.qps) / (high.qps - low.qps)
    return Response(
        qps,
        low.ttft_s + part * (high.ttft_s - low.ttft_s),
        low.tbt_s + part * (high.tbt_s - low.tbt_s),
        low.tokens_per_request,
    )


def traffic_qps(mean_qps: float, swing: float, minute: int) -> float:
    """Load at a minute of the day: lowest at midnight, highest at noon."""
    return mean_qps * (1.0 - swing * math.cos(2.0 * math.pi * minute / 1440.0))


def run_day(
    surface: Sequence[Response],
    mean_qps: float,
    *,
    swing: float = 0.6,
    safe_qps: float,
    max_replicas: int,
    autoscale: bool = True,
    start_minutes: int = 2,
    tbt_s: float,
) -> Day:
    """Walk a day. safe_qps: load a replica is scaled for; the fleet sees `start_minutes` ahead
    only as far as the trend of the last minutes goes."""
    ttft_all, ttft_weight, tbt_all, tbt_weight = [], [], [], []
    requests = tokens = hours = 0.0
    overloaded, history = 0, []
    for minute in range(1440):
        load = traffic_qps(mean_qps, swing, minute)
        if autoscale:
            before = traffic_qps(mean_qps, swing, max(0, minute - start_minutes))
            earlier = traffic_qps(mean_qps, swing, max(0, minute - 2 * start_minutes))
            expected = before + max(0.0, before - earlier)
            replicas = min(max_replicas, max(1, math.ceil(1.05 * expected / safe_qps)))
        else:
            replicas = max_replicas
        history.append(replicas)
        share = load / replicas
        overloaded += share > surface[-1].qps
        response = at_load(surface, share)
        count = 60.0 * load
        requests += count
        tokens += count * response.tokens_per_request
        hours += replicas / 60.0
        ttft_all.append(response.ttft_s)
        tbt_all.append(response.tbt_s)
        ttft_weight.append(count)
        tbt_weight.append(count)
    ttft = _mixture(ttft_all, ttft_weight)
    tbt = _mixture(tbt_all, tbt_weight)
    return Day(
        num_requests=requests,
        output_tokens=tokens,
        replica_hours=hours,
        peak_replicas=max(history),
        least_replicas=min(history),
        ttft_p50=_at(ttft, 0.5),
        ttft_p99=_at(ttft, 0.99),
        tbt_p50=_at(tbt, 0.5),
        tbt_p99=_at(tbt, 0.99),
        tbt_violations=float(tbt[1][tbt[0] > tbt_s * (1 + 1e-9)].sum()),
        minutes_overloaded=overloaded,
    )


def _mixture(parts: Sequence[Floats], weights: Sequence[float]) -> tuple[Floats, Floats]:
    """Sorted values and their shares, from quantile curves and how much each counts."""
    steps = np.diff(np.concatenate([[0.0], (GRID[1:] + GRID[:-1]) / 2, [1.0]]))
    values = np.concatenate(list(parts))
    shares = np.concatenate([w * steps for w in weights])
    order = np.argsort(values)
    return values[order], shares[order] / shares.sum()


def _at(mixture: tuple[Floats, Floats], quantile: float) -> float:
    values, shares = mixture
    index = int(np.searchsorted(np.cumsum(shares), quantile))
    return float(values[min(index, len(values) - 1)])


def example(
    model_name: str = "yi-34b-a100-tp2",
    dataset: str = "sharegpt4",
    tbt_s: float = 0.2,
    num_replicas: int = 1000,
    capacity_qps: float = 1.25,
    num_requests: int = 400,
) -> dict[str, Any]:
    """The worked example: a fixed fleet and an autoscaled one over the same day."""
    begin_s = time.perf_counter()
    model = load_model(model_name)
    config = scheduler_config(model, budget="adaptive", tbt_s=tbt_s)
    loads = [capacity_qps * f for f in (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.1)]
    surface = respond(model, config, parse_lengths(dataset), loads, num_requests)
    surface_s = time.perf_counter() - begin_s
    mean_qps = num_replicas * capacity_qps * 0.8 / 1.6  # noon at 80 % of the fleet's capacity
    days = {
        name: run_day(
            surface,
            mean_qps,
            safe_qps=0.8 * capacity_qps,
            max_replicas=num_replicas,
            autoscale=autoscale,
            tbt_s=tbt_s,
        ).to_dict()
        for name, autoscale in (("fixed fleet", False), ("autoscaled", True))
    }
    return {
        "model": model_name,
        "dataset": dataset,
        "surface_wall_s": surface_s,
        "day_wall_s": time.perf_counter() - begin_s - surface_s,
        "surface": [
            {
                "qps": r.qps,
                "ttft_p50": float(np.interp(0.5, GRID, r.ttft_s)),
                "ttft_p99": float(np.interp(0.99, GRID, r.ttft_s)),
                "tbt_p99": float(np.interp(0.99, GRID, r.tbt_s)),
            }
            for r in surface
        ],
        "days": days,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--model", default="yi-34b-a100-tp2")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = example(args.model, num_replicas=args.replicas)
    print(json.dumps(result, indent=None if args.json else 1))  # noqa: T201


if __name__ == "__main__":
    main()
