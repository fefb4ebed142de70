"""Why some figures of the paper are missed: experiments that change one assumption at a time.

    python -m app.simulate.studies.misses --out app/simulate/results

Rows are those of `legato simulate --paper`, with what is changed as their setting.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from actors.scheduling.cost.model import CostModel
from app.simulate.hardware.deployments import load_model
from app.simulate.hardware.networks import ETHERNET_BYTES_PER_S, ETHERNET_LATENCY_S
from app.simulate.hardware.shapes import MODELS
from app.simulate.paper import published
from app.simulate.paper.costs import decodes, whole_prompts
from app.simulate.paper.published import PublishedRow
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.studies.artifact_load import bisect, own_arrivals
from app.simulate.studies.artifact_rules import rule_rows
from app.simulate.studies.missed_capacities import arxiv_rows, capacity_qps, pipeline_rows
from app.simulate.tables import paper_markdown
from app.simulate.workload.arrivals import Arrivals, poisson
from app.simulate.workload.requests import generate
from app.simulate.workload.specs import parse_lengths

YI = "yi-34b-a100-tp2"
LOADS = {"sharegpt4": (0.4, 0.6, 0.8, 1.0), "arxiv": (0.15, 0.2, 0.25, 0.35, 0.5)}


def rows() -> Iterator[PublishedRow]:
    """All experiments; the last ones take minutes."""
    yield from interference_rows()
    yield from ethernet_rows()
    yield from script_rows()
    yield from ablation_rows()
    yield from chance_rows()
    yield from arxiv_rows()
    yield from pipeline_rows()
    yield from rule_rows()


# ---- Figure 9 -------------------------------------------------------------------------


def interference_rows() -> Iterator[PublishedRow]:
    """Figure 9: whole prompt over decode-only step, from the artifact's steps and from variants."""
    prompt_ms, alone_ms = published.PREFILL_MS[8192], published.DECODE_MS[8]
    where = "8 decodes, prompt of 8192"
    quantity = "whole prompt / decode-only"
    stated = published.INTERFERENCE
    ratio = (prompt_ms + alone_ms) / alone_ms
    yield PublishedRow("Figure 9", f"{where}, the artifact's steps", quantity, ratio, stated)
    for name in (YI, f"{YI}-artifact"):
        model = load_model(name)
        alone, together = decodes(model, 8, 1024), whole_prompts(model, 8192)
        together.num_decodes, together.decode_kv_tokens = 8, alone.decode_kv_tokens
        prompt_s, alone_s = model.latency_s(whole_prompts(model, 8192)), model.latency_s(alone)
        together_s = model.latency_s(together)
        at = f"{where}, {name}"
        yield PublishedRow("Figure 9", at, "prompt alone, ms", prompt_s * 1e3, prompt_ms)
        yield PublishedRow("Figure 9", at, "decodes alone, ms", alone_s * 1e3, alone_ms)
        yield PublishedRow("Figure 9", at, quantity, together_s / alone_s, stated)
        measured = "whole prompt / measured decode-only"
        yield PublishedRow("Figure 9", at, measured, together_s * 1e3 / alone_ms, stated)


# ---- Figure 13a -----------------------------------------------------------------------


def slower_ethernet(
    model: CostModel,
    latency_s: float = ETHERNET_LATENCY_S,
    bytes_per_s: float = ETHERNET_BYTES_PER_S,
) -> CostModel:
    """A deployment of Falcon-180B over two nodes with another link between them: its one-way
    latency, and the rate at which activations cross it."""
    more_s = latency_s - ETHERNET_LATENCY_S
    shape = MODELS["falcon-180b"]
    more_s_per_token = 2.0 * shape.hidden * (1.0 / bytes_per_s - 1.0 / ETHERNET_BYTES_PER_S)
    if model.num_stages > 1:
        sends = tuple((n, s + more_s + n * more_s_per_token) for n, s in model.transfer_s)
        return replace(model, transfer_s=sends)
    # An all-reduce crosses twice: to sum up, and to give the sum back.
    num_all_reduces = shape.all_reduces * shape.num_layers
    ring = 2.0 * (model.tensor_ranks - 1) / model.tensor_ranks
    tokens = (
        (n, s + num_all_reduces * (2.0 * more_s + ring * n * more_s_per_token))
        for n, s in model.tokens_s
    )
    return replace(model, tokens_s=tuple(tokens))


def tp8_over_pp(latency_s: float) -> float:
    """Median TBT of TP 8 over that of TP 4 x PP 2, 32 decodes at 4k."""
    wide = slower_ethernet(load_model("falcon-180b-a100-tp8"), latency_s)
    hybrid = slower_ethernet(load_model("falcon-180b-a100-tp4-pp2"), latency_s)
    # As in Figure 13a: the pipeline holds two micro-batches of 16.
    return wide.latency_s(decodes(wide, 32, 4096)) / hybrid.latency_s(decodes(hybrid, 16, 4096))


def ethernet_rows() -> Iterator[PublishedRow]:
    """Figure 13a: the latency of Ethernet at which TP 8 takes twice as long."""
    where, quantity = "Falcon-180B, 32 decodes at 4k", "median TBT, TP8 / TP4-PP2"
    stated = published.TP8_OVER_PP_TBT
    for latency_s in (ETHERNET_LATENCY_S, 0.3e-3, 0.6e-3, 1e-3):
        at = f"{where}, {latency_s * 1e3:g} ms one way"
        yield PublishedRow("Figure 13a", at, quantity, tp8_over_pp(latency_s), stated)
    needed_s = bisect(tp8_over_pp, stated, ETHERNET_LATENCY_S, 10e-3)
    yield PublishedRow("Figure 13a", where, "one-way latency that gives 2, ms", needed_s * 1e3)
    all_reduce_s = 2 * (needed_s - ETHERNET_LATENCY_S)
    yield PublishedRow("Figure 13a", where, "added to an all-reduce, ms", all_reduce_s * 1e3)
    falcon = published.DEPLOYMENTS[3]
    wide = slower_ethernet(load_model("falcon-180b-a100-tp8"), needed_s)
    hybrid = slower_ethernet(load_model(falcon.model), needed_s)
    chat = parse_lengths("sharegpt4")
    vllm = capacity_qps(wide, "vllm", chat, falcon.strict_s, 128, 0.2)
    sarathi = capacity_qps(hybrid, "sarathi", chat, falcon.strict_s, 128, 0.8)
    yield PublishedRow(
        "Figure 13b", f"Falcon-180B, sharegpt4, strict, {needed_s * 1e3:.2g} ms one way",
        "sarathi TP4-PP2 / vllm TP8", sarathi / vllm, published.SARATHI_OVER_VLLM_TP8,
    )  # fmt: skip


def script_rows(seconds: float = 900.0) -> Iterator[PublishedRow]:
    """Figure 13a as the artifact's script measures it: Sarathi at 0.75 QPS, not decodes alone.

    By the rate at which all-reduces cross the 100 Gb/s between the nodes, and what that rate does
    to Figure 13b.
    """
    quantity, stated = "median TBT, TP8 / TP4-PP2", published.TP8_OVER_PP_TBT
    for bytes_per_s in (ETHERNET_BYTES_PER_S, 7e9, 5e9):
        for most_requests in (32, 64, 128):
            ratio = script_ratio(bytes_per_s, most_requests, seconds)
            where = f"Falcon-180B, sharegpt4, 0.75 QPS, up to {most_requests} requests"
            where += f", {bytes_per_s / 1e9:g} GB/s"
            yield PublishedRow("Figure 13a", where, quantity, ratio, stated)
    falcon, chat = published.DEPLOYMENTS[3], parse_lengths("sharegpt4")
    for bytes_per_s in (ETHERNET_BYTES_PER_S, 5e9):
        wide, hybrid = (
            slower_ethernet(load_model(name), bytes_per_s=bytes_per_s)
            for name in ("falcon-180b-a100-tp8", falcon.model)
        )
        vllm = capacity_qps(wide, "vllm", chat, falcon.strict_s, 128, 0.2)
        sarathi = capacity_qps(hybrid, "sarathi", chat, falcon.strict_s, 128, 0.8)
        loads = published.LOADS_QPS[falcon.model, "sharegpt4"][0]
        where = f"Falcon-180B, sharegpt4, strict, {bytes_per_s / 1e9:g} GB/s"
        for quantity, found, stated in (
            ("vllm TP8 capacity, QPS", vllm, published.VLLM_TP8_QPS),
            ("sarathi TP4-PP2 capacity, QPS", sarathi, loads[1]),
            ("sarathi TP4-PP2 / vllm TP8", sarathi / vllm, published.SARATHI_OVER_VLLM_TP8),
        ):
            yield PublishedRow("Figure 13b", where, quantity, found, stated)


def script_ratio(bytes_per_s: float, most_requests: int, seconds: float) -> float:
    """Median TBT of TP 8 over that of TP 4 x PP 2, by the artifact's script."""
    medians = []
    for name in ("falcon-180b-a100-tp8", "falcon-180b-a100-tp4-pp2"):
        model = slower_ethernet(load_model(name), bytes_per_s=bytes_per_s)
        config = scheduler_config(
            model, policy="sarathi", token_budget=512, max_requests=most_requests
        )
        workload = generate(own_arrivals(0.75), parse_lengths("sharegpt4"), round(seconds))
        result = simulate(workload, Deployment(config, model), until_s=seconds)
        medians.append(result.summary().tbt_p50)
    return medians[0] / medians[1]


# ---- Table 4 --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Latency:
    """Means over the seeds, as in Table 4. late: share of tokens later than 0.2 s."""

    ttft_p50_s: float
    tbt_p99_s: float
    late: float


def latency(
    policy: str,
    dataset: str,
    qps: float,
    token_budget: int = 512,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    arrivals: Callable[[float], Arrivals] = poisson,
) -> Latency:
    """Table 4's figures of a policy at a load: Yi-34B, 128 requests."""
    model = load_model(YI)
    config = scheduler_config(model, policy=policy, token_budget=token_budget)
    found = []
    for seed in seeds:
        workload = generate(arrivals(qps), parse_lengths(dataset), 128, seed=seed)
        result = simulate(workload, Deployment(config, model))
        summary, gaps = result.summary(), np.frombuffer(result.record.gaps_s, np.float64)
        found.append((summary.ttft_p50, summary.tbt_p99, float((gaps > 0.2).mean())))
    return Latency(*np.mean(found, axis=0).tolist())


def ablation_rows(datasets: Sequence[str] = published.DATASETS) -> Iterator[PublishedRow]:
    """Table 4: the same runs at other loads, and with the token budget that its caption names."""
    for dataset in datasets:
        loads = LOADS[dataset]
        where = f"{dataset}, {loads[-1]:g} QPS, the artifact's prefill steps"
        busy = loads[-1] * _artifact_prefill_s(dataset)
        yield PublishedRow("Table 4", where, "time for prompts alone, share", busy)
        target_s = published.ABLATION["sarathi"][dataset][0]
        measure = partial(_sarathi_ttft_s, dataset)
        matched = bisect(measure, target_s, loads[0], loads[-1], 0.02)
        for qps in (*loads, matched):
            note = ", sarathi's TTFT matched" if qps == matched else ""
            for policy in published.ABLATION:
                yield from _ablation(policy, dataset, qps, note)
        for policy in ("chunked_only", "sarathi"):
            yield from _ablation(policy, dataset, matched, ", budget 1024", 1024)


def chance_rows(num_seeds: int = 12) -> Iterator[PublishedRow]:
    """Table 4's 128 requests of one seed: what chance can do at the artifact's loads."""
    for dataset in published.DATASETS:
        qps = published.ABLATION_QPS[dataset]
        for name, arrivals in (("Poisson", poisson), ("the artifact's arrivals", own_arrivals)):
            for policy in ("hybrid_only", "sarathi"):
                found = [
                    latency(policy, dataset, qps, seeds=(seed,), arrivals=arrivals)
                    for seed in range(num_seeds)
                ]
                ttft_s, tbt_s = published.ABLATION[policy][dataset]
                where = f"{dataset}, {qps:g} QPS, {name}, lowest of {num_seeds} seeds, {policy}"
                lowest_s = min(f.ttft_p50_s for f in found)
                yield PublishedRow("Table 4", where, "P50 TTFT, s", lowest_s, ttft_s)
                lowest_s = min(f.tbt_p99_s for f in found)
                yield PublishedRow("Table 4", where, "P99 TBT, s", lowest_s, tbt_s)


def _artifact_prefill_s(dataset: str) -> float:
    """Mean seconds of a whole prompt, interpolated between the artifact's measured steps."""
    prompts = generate(poisson(1.0), parse_lengths(dataset), 4096).prompt_tokens
    steps_ms = published.PREFILL_MS
    return float(np.interp(prompts, list(steps_ms), list(steps_ms.values())).mean()) / 1e3


def _sarathi_ttft_s(dataset: str, qps: float) -> float:
    return latency("sarathi", dataset, qps).ttft_p50_s


def _ablation(
    policy: str, dataset: str, qps: float, note: str, token_budget: int = 512
) -> Iterator[PublishedRow]:
    found = latency(policy, dataset, qps, token_budget)
    ttft_s, tbt_s = published.ABLATION[policy][dataset]
    where = f"{dataset}, {qps:.3g} QPS{note}, {policy}"
    yield PublishedRow("Table 4", where, "P50 TTFT, s", found.ttft_p50_s, ttft_s)
    yield PublishedRow("Table 4", where, "P99 TBT, s", found.tbt_p99_s, tbt_s)
    if policy == "hybrid_only":
        yield PublishedRow("Table 4", where, "tokens later than 0.2 s, share", found.late)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write misses.md and misses.json here")
    args = parser.parse_args()
    found = []
    for row in rows():
        found.append(row)
        print(paper_markdown([row]).splitlines()[-1], flush=True)  # noqa: T201  the output
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        data = {"rows": [row.to_dict() for row in found]}
        (args.out / "misses.json").write_text(json.dumps(data, indent=1) + "\n", "utf-8")
        (args.out / "misses.md").write_text(paper_markdown(found), "utf-8")


if __name__ == "__main__":
    main()
