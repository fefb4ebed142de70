"""`legato bench bubbles`: pipeline time lost to bubbles, simulated.

The paper's LLaMA2-70B on two stages of four A40s, chat lengths, the same arrivals throughout:
greedy or uniform micro-batches (decodes shared out evenly) x a fixed or a throttled budget
(`actors.scheduling.budgets.throttled`), with ample KV memory and with so little that it binds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer

from app.bench.report import make_report, publish
from app.bench.terminal import Json, Out, output, progress, table
from app.simulate.hardware.deployments import load_model
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import sharegpt4
from app.simulate.workload.requests import generate

MODEL, TOKEN_BUDGET = "llama2-70b-a40-tp4-pp2", 512
CASES = tuple((m, b) for m in ("greedy", "uniform") for b in ("fixed", "throttled"))
LOADS = ((0.3, None), (0.6, None), (0.6, 60_000))  # QPS, KV tokens (None: all the memory there is)


@dataclass(frozen=True, slots=True)
class BubbleRun:
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


def simulate_bubbles(
    qps: float, kv_tokens: int | None, micro_batches: str, budget: str, num_requests: int = 400
) -> BubbleRun:
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
    return BubbleRun(
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


def command(
    context: typer.Context,
    requests: Annotated[int, typer.Option(min=2, help="Of each simulated run.")] = 400,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Bubbles of a simulated pipeline, by micro-batches, budget and KV memory."""
    pairs = [(load, case) for load in LOADS for case in CASES]
    found = [
        simulate_bubbles(qps, kv_tokens, micro_batches, budget, requests)
        for (qps, kv_tokens), (micro_batches, budget) in progress(pairs, "simulating")
    ]
    publish(make_report(context, {"results": [asdict(run) for run in found]}), as_json, out)
    if not as_json:
        columns = ("micro-batches", "budget", "QPS", "KV tokens", "bubbles, %", "tokens/s",
                   "TTFT P50, s", "TBT P99, s", "preemptions")  # fmt: skip
        rows = [
            (
                *(r.micro_batches, r.budget, f"{r.qps:g}", str(r.kv_tokens)),
                *(f"{100 * r.bubble_share:.1f}", f"{r.output_tokens_per_s:.0f}"),
                *(f"{r.ttft_p50_s:.2f}", f"{r.tbt_p99_s:.2f}", str(r.num_preemptions)),
            )
            for r in found
        ]
        output.print(table(f"{MODEL}, budget {TOKEN_BUDGET}", columns, rows, num_words=2))
