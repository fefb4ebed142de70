"""Requests that leave the engine they were sent to: what is missed with and without.

    python -m app.simulate.studies.rebalance [--seeds 0,1,2]

The engines, traffic and objectives of the routing study, under the router `slack`: a fleet at its
limit, and one that is scaled from a single engine to what the traffic needs. No KV is shared, so
what moves is computed anew.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from actors.fleet.scaling import Bounds
from app.simulate.hardware.deployments import load_model
from app.simulate.run.simulation import Autoscale, Deployment, scheduler_config, simulate
from app.simulate.studies.routing import MODEL, TBT_S, TRACES


@dataclass(frozen=True, slots=True)
class Case:
    """rate: requests a second and engine. grows: the fleet begins with one engine."""

    trace: str
    rate: float
    num_engines: int
    seconds: float
    grows: bool


CASES = (
    Case("conversations", 11.0, 8, 60.0, grows=False),
    Case("documents", 1.1, 8, 60.0, grows=False),
    Case("conversations", 8.0, 4, 100.0, grows=True),
    Case("documents", 0.9, 4, 100.0, grows=True),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shares of the requests of several runs. num_moves: in all runs."""

    num_requests: int
    missed: float
    ttft_p99_s: float
    num_moves: int


def run(case: Case, rebalance: bool, seeds: tuple[int, ...]) -> Outcome:
    """Simulate one case with each seed."""
    model, ttft_s = load_model(MODEL), TRACES[case.trace].ttft_s
    config = scheduler_config(
        model, budget="adaptive", tbt_s=TBT_S, ttft_s=ttft_s, prefix_cache=True
    )
    bounds = Bounds(1, 2 * case.num_engines)
    scale = Autoscale("slack", bounds=bounds, interval_s=5.0, start_s=20.0, drain_s=30.0)
    waits_s, slow, num_moves = [], [], 0
    for seed in seeds:
        traffic = TRACES[case.trace].draw(case.num_engines, case.rate, case.seconds, seed)
        found = simulate(
            traffic,
            Deployment(
                config, model, num_replicas=1 if case.grows else case.num_engines,
                routing="slack", autoscale=scale if case.grows else None, rebalance=rebalance,
            ),
        )  # fmt: skip
        record = found.record
        waits_s.append(np.array(record.first_token_s) - np.array(record.arrival_s))
        slow.append(np.array(record.max_gap_s) > TBT_S * (1 + 1e-9))
        num_moves += len(found.moves)
    wait_s = np.concatenate(waits_s)
    missed = ~(wait_s <= ttft_s) | np.concatenate(slow)
    return Outcome(
        len(wait_s), float(missed.mean()), float(np.nanquantile(wait_s, 0.99)), num_moves
    )


def row(case: Case, rebalance: bool, seeds: tuple[int, ...]) -> str:
    """One line of the table."""
    found = run(case, rebalance, seeds)
    fleet = f"1 to {2 * case.num_engines}" if case.grows else str(case.num_engines)
    return (
        f"| {case.trace} | {fleet} | {'yes' if rebalance else 'no'} | {found.num_requests:,} "
        f"| {found.missed:.2%} | {found.ttft_p99_s:.1f} | {found.num_moves} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="numbers of the runs of each case")
    seeds = tuple(int(seed) for seed in parser.parse_args().seeds.split(","))
    print(  # noqa: T201  the study's output
        "| trace | engines | rebalanced | requests | missed | P99 TTFT, s | moves |\n"
        "|---|---|---|---:|---:|---:|---:|"
    )
    for case in CASES:
        for rebalance in (False, True):
            print(row(case, rebalance, seeds), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
