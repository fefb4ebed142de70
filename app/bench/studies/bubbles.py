"""Pipeline time lost to bubbles, simulated: `python -m app.bench.studies.bubbles [--json]`.

The paper's LLaMA2-70B on two stages of four A40s, chat lengths, the same arrivals throughout:
greedy or uniform micro-batches (decodes shared out evenly) x a fixed or a throttled budget
(`actors.scheduling.budgets.throttled`), with ample KV memory and with so little that it binds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from app.simulate.hardware.deployments import load_model
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import sharegpt4
from app.simulate.workload.requests import generate

MODEL, TOKEN_BUDGET = "llama2-70b-a40-tp4-pp2", 512
CASES = tuple((m, b) for m in ("greedy", "uniform") for b in ("fixed", "throttled"))
LOADS = ((0.3, None), (0.6, None), (0.6, 60_000))  # QPS, KV tokens (None: all the memory there is)


@dataclass(frozen=True, slots=True)
class Measured:
    """One simulated run. bubble_share: of the stages' time while work was in flight."""

    qps: float
    kv_tokens: int
    micro_batches: str
    budget: str
    bubble_share: float
    output_tokens_per_s: float
    ttft_p50_s: float
    tbt_p99_s: float
    num_preemptions: int


def measure(
    qps: float, kv_tokens: int | None, micro_batches: str, budget: str, num_requests: int = 400
) -> Measured:
    model = load_model(MODEL)
    if kv_tokens is not None:
        model = replace(model, kv_tokens=kv_tokens)
    config = scheduler_config(
        model,
        budget=budget,
        token_budget=TOKEN_BUDGET,
        micro_batches=micro_batches,
    )
    workload = generate(poisson(qps), sharegpt4(), num_requests)
    summary = simulate(workload, Deployment(config, model)).summary()
    return Measured(
        qps,
        model.kv_tokens,
        micro_batches,
        budget,
        bubble_share=summary.bubble_share,
        output_tokens_per_s=summary.output_tokens_per_s,
        ttft_p50_s=summary.ttft_p50,
        tbt_p99_s=summary.tbt_p99,
        num_preemptions=summary.num_preemptions,
    )


def measure_all(num_requests: int) -> Iterator[Measured]:
    for qps, kv_tokens in LOADS:
        for case in CASES:
            yield measure(qps, kv_tokens, *case, num_requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    arguments = parser.parse_args()
    found = list(measure_all(arguments.requests))
    write = sys.stdout.write
    if arguments.json:
        write(json.dumps([asdict(row) for row in found], indent=2) + "\n")
        return 0
    write("| QPS | KV tokens | micro-batches | budget | bubbles | tokens/s | TTFT P50 | TBT P99 | ")
    write("preemptions |\n|---:|---:|---|---|---:|---:|---:|---:|---:|\n")
    for row in found:
        write(f"| {row.qps:g} | {row.kv_tokens} | {row.micro_batches} | {row.budget} | ")
        write(f"{100 * row.bubble_share:.1f} % | {row.output_tokens_per_s:.0f} | ")
        write(f"{row.ttft_p50_s:.2f} s | {row.tbt_p99_s:.2f} s | {row.num_preemptions} |\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
