"""The paper's motivation in short runs: stalls (Figure 1), policies (2), pipeline bubbles (8)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from app.simulate.hardware.deployments import load_model
from app.simulate.paper import published
from app.simulate.paper.costs import decodes, whole_prompts
from app.simulate.paper.published import PublishedRow
from app.simulate.run.record import Summary
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.requests import generate
from app.simulate.workload.specs import parse_lengths

LOW_QPS, HIGH_QPS = 0.3, 0.9  # Figure 1b, Yi-34B on chat: a quarter and three quarters of capacity
SATURATING_QPS = 4.0  # Figure 2: more than any policy serves


def motivation_rows(traces: Mapping[str, str] = MappingProxyType({})) -> list[PublishedRow]:
    """Rows of Figures 1, 2 and 8. traces: recorded lengths in the place of a dataset's."""
    chat, arxiv = (traces.get(name, name) for name in published.DATASETS)
    return [*stall_rows(chat, arxiv), *policy_rows(chat), *bubble_rows(chat)]


def run(
    model_name: str,
    policy: str,
    lengths: str,
    qps: float,
    num_requests: int,
    seed: int = 0,
    max_requests: int = 128,
) -> Summary:
    """One run under a policy of the paper, token budget 512."""
    model = load_model(model_name)
    config = scheduler_config(model, policy=policy, token_budget=512, max_requests=max_requests)
    workload = generate(poisson(qps), parse_lengths(lengths), num_requests, seed=seed)
    return simulate(workload, Deployment(config, model), seed=seed).summary()


def stall_rows(chat: str, arxiv: str) -> list[PublishedRow]:
    """Figure 1: prompts stall decodes under vLLM (a), the more the higher the load (b)."""
    rows = []
    for policy, theirs in (("vllm", published.STALL_S), ("sarathi", None)):
        longest_s = run("yi-34b-a100-tp2", policy, arxiv, 0.2, 128).tbt_max
        bound = "at least" if theirs else ""
        where = f"Yi-34B, arxiv, 0.2 QPS, {policy}"
        rows.append(PublishedRow("Figure 1a", where, "longest TBT, s", longest_s, theirs, bound))
    for policy, least in (("vllm", 1.0), ("sarathi", None)):
        low, high = (
            run("yi-34b-a100-tp2", policy, chat, qps, 256).tbt_p99 for qps in (LOW_QPS, HIGH_QPS)
        )
        where = f"Yi-34B, sharegpt4, {policy}"
        rows += [
            PublishedRow("Figure 1b", f"{where}, {qps} QPS", "P99 TBT, s", value)
            for qps, value in ((LOW_QPS, low), (HIGH_QPS, high))
        ]
        bound = "at least" if least else ""
        quantity = f"P99 TBT at {HIGH_QPS} / at {LOW_QPS} QPS"
        rows.append(PublishedRow("Figure 1b", where, quantity, high / low, least, bound))
    return rows


def policy_rows(chat: str) -> list[PublishedRow]:
    """Figure 2: throughput and tail latency of the policies, saturated with chat (Yi-34B)."""
    rows, found = [], {}
    for policy in ("faster_transformer", "orca", "vllm", "sarathi"):
        cap = 16 if policy == "orca" else 128
        found[policy] = run("yi-34b-a100-tp2", policy, chat, SATURATING_QPS, 256, max_requests=cap)
        where = f"Yi-34B, sharegpt4, saturated, {policy}"
        rows += [
            PublishedRow("Figure 2", where, "output token/s", found[policy].output_tokens_per_s),
            PublishedRow("Figure 2", where, "P99 TBT, s", found[policy].tbt_p99),
        ]
    request_level, vllm, sarathi = (found[p] for p in ("faster_transformer", "vllm", "sarathi"))
    where = "Yi-34B, sharegpt4, saturated"
    rows += [
        PublishedRow(
            "Figure 2", where, "throughput, vllm / faster_transformer",
            vllm.output_tokens_per_s / request_level.output_tokens_per_s,
            published.OVER_FASTER_TRANSFORMER,
        ),
        PublishedRow(
            "Figure 2", where, "P99 TBT, faster_transformer / vllm",
            request_level.tbt_p99 / vllm.tbt_p99, 1.0, "at most",
        ),
        PublishedRow(
            "Figure 2", where, "throughput, sarathi / vllm",
            sarathi.output_tokens_per_s / vllm.output_tokens_per_s, 1.0,
        ),
        PublishedRow(
            "Figure 2", where, "P99 TBT, sarathi / vllm",
            sarathi.tbt_p99 / vllm.tbt_p99, 1.0, "at most",
        ),
    ]  # fmt: skip
    return rows


def bubble_rows(chat: str) -> list[PublishedRow]:
    """Figure 8 and section 3.3: bubbles on Falcon-180B, TP 4 and two stages."""
    model = load_model("falcon-180b-a100-tp4-pp2")
    prompt, batch = whole_prompts(model, 4096), decodes(model, 32, 4096)
    prompt_ms, batch_ms = model.stage_s(prompt) * 1e3, model.stage_s(batch) * 1e3
    latency_ms = model.latency_s(batch) * 1e3
    where = "Falcon-180B"
    rows = [
        PublishedRow(
            "Figure 8", where, "prompt of 4096, a stage, ms", prompt_ms, published.PROMPT_4K_MS
        ),
        PublishedRow(
            "Figure 8", where, "32 decodes at 4k, both stages, ms", latency_ms,
            published.DECODES_32_MS,
        ),
        PublishedRow(
            "Figure 8", where, "bubble between them, ms", prompt_ms - batch_ms, published.BUBBLE_MS
        ),
    ]  # fmt: skip
    shares = {}
    for policy in ("orca", "vllm", "sarathi"):
        shares[policy] = run("falcon-180b-a100-tp4-pp2", policy, chat, 0.4, 128).bubble_share
        at = f"{where}, sharegpt4, 0.4 QPS, {policy}"
        rows.append(PublishedRow("Figure 8", at, "bubbles / stage time", shares[policy]))
    for policy in ("orca", "vllm"):
        ratio = shares["sarathi"] / shares[policy]
        at = f"{where}, sharegpt4, 0.4 QPS"
        quantity = f"bubbles, sarathi / {policy}"
        rows.append(PublishedRow("Figure 8", at, quantity, ratio, 1.0, "at most"))
    return rows
