"""Does choosing the budget anew each step pay? Capacity of fixed and adaptive budgets.

    python -m app.simulate.studies.budgets --cache app/simulate/results/capacities.json \\
        --out app/simulate/results

For the paper's four deployments and two datasets under the strict objective: Sarathi with several
fixed budgets, the adaptive budget (untuned), and both with a deadline order of the queue.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from actors.scheduling.cost.mix import causal_pairs
from actors.scheduling.cost.model import CostModel
from app.simulate.hardware.deployments import load_model
from app.simulate.paper import published
from app.simulate.run.campaign import CapacityJob, run_jobs
from app.simulate.run.capacity import MEDIAN_DELAY_LIMIT_S
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.requests import Workload, generate
from app.simulate.workload.specs import parse_lengths

BUDGETS = (256, 384, 512, 640, 768, 1024)


def jobs(num_requests: int) -> list[CapacityJob]:
    """All searches of the study."""
    found: list[CapacityJob] = []
    for d in published.DEPLOYMENTS:
        for dataset, guess in zip(published.DATASETS, d.guesses, strict=True):
            base = (d.model, dataset, d.strict_s, "sarathi", 128)
            found += [CapacityJob(*base, b, guess, num_requests) for b in BUDGETS]
            found += [
                CapacityJob(*base, 512, guess, num_requests, budget=budget, order=order)
                for budget, order in (
                    ("adaptive", "auto"),
                    ("adaptive", "deadline"),
                    ("fixed", "deadline"),
                )
            ]
    return found


def service_s(model: CostModel, workload: Workload) -> tuple[list[float], float]:
    """Seconds that the slowest stage needs for each prompt, and for a request's decodes on average,
    every token at its cheapest and steps costing nothing.

    No budget can do with less: overheads, tile remainders and bubbles come on top.
    """
    per_token_s = min(model.linear_s(n) / n for n in range(1, 8193))
    window = model.attention_window
    prompts, outputs = workload.prompt_tokens.tolist(), workload.output_tokens.tolist()
    prefill_s, decode_s = [], 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        mean_context = prompt + output / 2
        seen = min(mean_context, window) if window else mean_context
        prefill_s.append(
            prompt * per_token_s + model.prefill_pair_s * causal_pairs(0, prompt, window)
        )
        decode_s += (output - 1) * (per_token_s + model.decode_kv_s * seen)
        decode_s += model.per_request_s * output
    return prefill_s, decode_s / len(workload)


def compute_bound_qps(prefill_s: Sequence[float], decode_s: float) -> float:
    """Load at which such a machine never idles: no budget, order or policy can serve more."""
    return 1.0 / (sum(prefill_s) / len(prefill_s) + decode_s)


def queue_bound_qps(prefill_s: Sequence[float], decode_s: float, workload: Workload) -> float:
    """Load at which such a machine, first come first served, has the median delay of capacity.

    Decodes take their steady share of it, prompts queue for the rest. Capacity tolerates a median
    of two seconds before the first chunk, and a queue reaches that below the compute bound,
    whatever the budget. To pass this bound takes another order.
    """
    low, high = 0.0, compute_bound_qps(prefill_s, decode_s)
    while high - low > 1e-3 * high:
        qps = (low + high) / 2
        share = 1.0 - qps * decode_s
        free_s, delays = 0.0, []
        for arrival_s, needed_s in zip(workload.at_rate(qps).arrival_s, prefill_s, strict=True):
            begin_s = max(float(arrival_s), free_s)
            delays.append(begin_s - float(arrival_s))
            free_s = begin_s + needed_s / share
        low, high = (qps, high) if median(delays) <= MEDIAN_DELAY_LIMIT_S else (low, qps)
    return low


def rows(results: dict[str, dict[str, Any]], num_requests: int) -> list[dict[str, Any]]:
    """One row per deployment and dataset with everything that is finished."""
    table: dict[tuple[str, str], dict[str, Any]] = {}
    for job in jobs(num_requests):
        if job.key not in results:
            continue
        row = table.setdefault(
            (job.model, job.dataset), {"model": job.model, "dataset": job.dataset}
        )
        name = f"fixed {job.token_budget}" if job.budget == "fixed" else "adaptive"
        if job.order != "auto":
            name += f", {job.order}"
        row[name] = results[job.key]["qps"]
        if name == "adaptive":
            summary = results[job.key]["summary"]
            row["adaptive P99 TBT / objective"] = (
                summary["tbt_p99"] / job.tbt_s if summary else None
            )
            row["adaptive longest TBT / objective"] = (
                summary["tbt_max"] / job.tbt_s if summary else None
            )
    for row in table.values():
        workload = generate(poisson(1.0), parse_lengths(row["dataset"]), num_requests)
        prefill_s, decode_s = service_s(load_model(row["model"]), workload)
        row["compute bound"] = compute_bound_qps(prefill_s, decode_s)
        row["queue bound"] = queue_bound_qps(prefill_s, decode_s, workload)
        fixed = {b: row[f"fixed {b}"] for b in BUDGETS if f"fixed {b}" in row}
        if fixed:
            best = max(fixed, key=lambda b: fixed[b])
            row["best fixed"], row["best fixed QPS"] = best, fixed[best]
    return list(table.values())


def markdown(table: list[dict[str, Any]]) -> str:
    """The study as a Markdown table, capacities in QPS."""
    columns = [
        *(f"fixed {b}" for b in BUDGETS),
        "adaptive",
        "queue bound",
        "compute bound",
        "fixed 512, deadline",
        "adaptive, deadline",
    ]
    lines = [
        "| deployment | dataset | "
        + " | ".join(columns)
        + " | longest TBT / objective, adaptive |",
        "|---|---|" + "---:|" * (len(columns) + 1),
    ]
    for row in table:
        cells = [f"{row[c]:.3g}" if row.get(c) is not None else "-" for c in columns]
        worst = row.get("adaptive longest TBT / objective")
        cells.append(f"{worst:.2f}" if worst is not None else "-")
        lines.append(f"| {row['model']} | {row['dataset']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--requests", type=int, default=768)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this long")
    args = parser.parse_args()
    begin_s = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    for job in jobs(args.requests):
        results |= run_jobs([job], args.cache, args.workers)
        if time.monotonic() - begin_s > 60 * args.minutes:
            break
    table = rows(results, args.requests)
    print(markdown(table))  # noqa: T201  the study's output
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "budgets.json").write_text(json.dumps(table, indent=1) + "\n", "utf-8")
        (args.out / "budgets.md").write_text(markdown(table), "utf-8")


if __name__ == "__main__":
    main()
