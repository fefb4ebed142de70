"""How fast the simulator is: simulated output tokens per second on one core.

python -m app.bench.studies.simulator [--requests 2000] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from app.simulate.hardware.deployments import load_model
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import sharegpt4
from app.simulate.workload.requests import generate

CASES = (  # policy, budget, QPS; Yi-34B on two A100s, chat lengths
    ("sarathi", "fixed", 1.1),
    ("sarathi", "adaptive", 1.1),
    ("vllm", "fixed", 1.1),
    ("orca", "fixed", 1.1),
)


def run(num_requests: int, policy: str, budget: str, qps: float) -> dict[str, Any]:
    """Simulate once; wall time excludes drawing the workload."""
    model = load_model("yi-34b-a100-tp2")
    config = scheduler_config(model, policy=policy, budget=budget, token_budget=512, tbt_s=0.2)
    workload = generate(poisson(qps), sharegpt4(), num_requests)
    begin_s = time.perf_counter()
    result = simulate(workload, Deployment(config, model))
    wall_s = time.perf_counter() - begin_s
    tokens = sum(result.record.num_output_tokens)
    return {
        "policy": policy,
        "budget": budget,
        "qps": qps,
        "num_requests": num_requests,
        "output_tokens": tokens,
        "steps": result.record.num_steps,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "us_per_step": wall_s / result.record.num_steps * 1e6,
        "simulated_s_per_s": result.record.end_s / wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [
        run(args.requests * scale, policy, budget, qps)
        for policy, budget, qps in CASES
        for scale in ((1, 2, 4) if (policy, budget) == ("sarathi", "fixed") else (1,))
    ]
    if args.json:
        print(json.dumps(rows))  # noqa: T201  the benchmark's output
        return
    for row in rows:
        print(  # noqa: T201
            f"{row['policy']:8} {row['budget']:8} {row['num_requests']:6} requests  "
            f"{row['output_tokens']:9,} tokens in {row['wall_s']:6.2f} s = "
            f"{row['tokens_per_s']:9,.0f} tokens/s, {row['us_per_step']:5.0f} us a step"
        )


if __name__ == "__main__":
    main()
