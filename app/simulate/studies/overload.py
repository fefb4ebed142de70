"""Overload: what predictive admission keeps at capacity, three and ten times it.

    python -m app.simulate.studies.overload [--seed 0]

The paper's deployments under chat, adaptive budget, the strict TBT objective and ten seconds to the
first token; loads are multiples of the capacity found in `results/budgets.md`.
"""

from __future__ import annotations

import argparse

import numpy as np

from app.simulate.hardware.deployments import load_model
from app.simulate.paper import published
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import sharegpt4
from app.simulate.workload.requests import generate

CAPACITY_QPS = {
    "mistral-7b-a100": 2.75,
    "yi-34b-a100-tp2": 1.31,
    "llama2-70b-a40-tp4-pp2": 0.891,
    "falcon-180b-a100-tp4-pp2": 0.891,
}
FACTORS = (1.0, 3.0, 10.0)
TTFT_S = 10.0


def row(model: str, tbt_s: float, factor: float, seconds: float, seed: int) -> str:
    """One line of the table: a run of `seconds` of arrivals."""
    truth = load_model(model)
    qps = factor * CAPACITY_QPS[model]
    config = scheduler_config(
        truth, budget="adaptive", admission="predictive", tbt_s=tbt_s, ttft_s=TTFT_S
    )
    traffic = generate(poisson(qps), sharegpt4(), int(qps * seconds), seed)
    result = simulate(traffic, Deployment(config, truth))
    summary, record = result.summary(), result.record
    ttft_s = np.array(record.first_token_s) - np.array(record.arrival_s)
    in_time = float((ttft_s[~np.isnan(ttft_s)] <= TTFT_S).mean())
    return (
        f"| {model} | {factor:g} x | {summary.num_refused / summary.num_requests:.0%} "
        f"| {summary.tbt_max / tbt_s:.2f} | {in_time:.1%} | {summary.ttft_p99:.1f} "
        f"| {summary.goodput:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=200.0, help="arrivals of one run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(  # noqa: T201  the study's output
        "| deployment | load | refused | longest TBT / objective | first token in time "
        "| P99 TTFT, s | goodput, QPS |\n|---|---:|---:|---:|---:|---:|---:|"
    )
    for deployment in published.DEPLOYMENTS:
        for factor in FACTORS:
            print(  # noqa: T201
                row(deployment.model, deployment.strict_s, factor, args.seconds, args.seed),
                flush=True,
            )


if __name__ == "__main__":
    main()
