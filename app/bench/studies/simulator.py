"""`legato bench simulator`: simulated output tokens per second of one core."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from app.bench.report import make_report, publish
from app.bench.terminal import Json, Out, output, progress, table
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


def time_simulation(num_requests: int, policy: str, budget: str, qps: float) -> dict[str, Any]:
    """Simulate once; wall time excludes drawing the workload."""
    model = load_model("yi-34b-a100-tp2")
    config = scheduler_config(model, policy=policy, budget=budget, tbt_s=0.2)
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


def command(
    context: typer.Context,
    requests: Annotated[int, typer.Option(min=2, help="Of the smallest run.")] = 1000,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """How fast the simulator is, by policy, budget and number of requests."""
    runs = [
        (requests * scale, *case)
        for case in CASES
        for scale in ((1, 2, 4) if case[:2] == ("sarathi", "fixed") else (1,))
    ]
    found = [time_simulation(*run) for run in progress(runs, "simulating")]
    publish(make_report(context, {"results": found}), as_json, out)
    if not as_json:
        columns = ("policy", "budget", "requests", "tokens", "seconds", "tokens/s", "us per step")
        rows = [
            (
                *(r["policy"], r["budget"], str(r["num_requests"]), f"{r['output_tokens']:,}"),
                *(f"{r['wall_s']:.2f}", f"{r['tokens_per_s']:,.0f}", f"{r['us_per_step']:.0f}"),
            )
            for r in found
        ]
        output.print(table("Yi-34B on two A100s, chat lengths", columns, rows, num_words=2))
