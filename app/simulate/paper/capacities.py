"""The paper's capacities, simulated: Figures 10 to 13 as rows beside the published numbers.

Nothing here is fitted to the answer: cost models come from operator timings, policies are the
product's own. What needs no capacity search is in `steps`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actors.scheduling.cost.mix import Mix
from app.simulate.hardware.deployments import load_model
from app.simulate.paper import published
from app.simulate.paper.published import PublishedRow
from app.simulate.run.campaign import CapacityJob


def capacity_jobs(num_requests: int, deployments: Iterable[str] = ()) -> list[CapacityJob]:
    """Figures 10 and 11: every deployment, dataset, objective and system."""
    wanted = set(deployments)
    jobs = []
    for d in published.DEPLOYMENTS:
        if wanted and d.model not in wanted:
            continue
        for dataset, guess in zip(published.DATASETS, d.guesses, strict=True):
            for slo, budget in zip(published.SLOS, d.budgets, strict=True):
                for system in published.SYSTEMS:
                    cap = d.orca_batch if system == "orca" else 128
                    jobs.append(
                        CapacityJob(
                            d.model, dataset, d.slo_s(slo), system, cap, budget, guess, num_requests
                        )
                    )
    return jobs


def tp8_jobs(num_requests: int) -> list[CapacityJob]:
    """Figure 13b: vLLM on Falcon-180B with TP 8 across nodes."""
    falcon = published.DEPLOYMENTS[3]
    return [
        CapacityJob(
            "falcon-180b-a100-tp8", "sharegpt4", falcon.slo_s(slo), "vllm", 128, 512, 0.2,
            num_requests,
        )
        for slo in published.SLOS
    ]  # fmt: skip


def curve_jobs(num_requests: int) -> list[CapacityJob]:
    """Figure 12: capacity against the objective."""
    jobs = []
    for d in published.DEPLOYMENTS[:2]:
        for tbt_s in published.CURVE_OBJECTIVES[d.model]:
            settings = [("vllm", cap, 512) for cap in (32, 64, 128)]
            settings += [("sarathi", 128, budget) for budget in (512, 2048)]
            for system, cap, budget in settings:
                jobs.append(
                    CapacityJob(
                        d.model, "sharegpt4", tbt_s, system, cap, budget, d.guesses[0], num_requests
                    )
                )
    return jobs


def capacity_rows(results: dict[str, dict[str, Any]], num_requests: int) -> list[PublishedRow]:
    """Capacities and their ratios, for every deployment that has results."""
    by = {job.key: job for job in capacity_jobs(num_requests)}
    qps = {
        (j.model, j.dataset, j.tbt_s, j.system): results[k]["qps"]
        for k, j in by.items()
        if k in results
    }
    rows: list[PublishedRow] = []
    for d in published.DEPLOYMENTS:
        figure = "Figure 10" if "falcon" not in d.model and "70b" not in d.model else "Figure 11"
        vllm = {(s, o): r for s, o, r in published.OVER_VLLM[d.model]}
        for dataset in published.DATASETS:
            for index, slo in enumerate(published.SLOS):
                found = [qps.get((d.model, dataset, d.slo_s(slo), s)) for s in published.SYSTEMS]
                orca, paged, sarathi = found
                if not orca or not paged or not sarathi:
                    continue
                where = f"{d.label}, {dataset}, {slo}"
                rows += [
                    PublishedRow(figure, where, f"{s} capacity, QPS", q)
                    for s, q in zip(published.SYSTEMS, (orca, paged, sarathi), strict=True)
                ]
                theirs = published.OVER_ORCA[d.model][dataset][index]
                rows.append(PublishedRow(figure, where, "sarathi / orca", sarathi / orca, theirs))
                rows.append(
                    PublishedRow(
                        figure, where, "sarathi / vllm", sarathi / paged, vllm.get((dataset, slo))
                    )
                )
    return rows


def tp8_rows(results: dict[str, dict[str, Any]], num_requests: int) -> list[PublishedRow]:
    """Figure 13: tensor parallelism across nodes."""
    falcon = published.DEPLOYMENTS[3]
    hybrid, wide = load_model(falcon.model), load_model("falcon-180b-a100-tp8")
    mix = Mix(32, 32 * 4096)
    # Two micro-batches of 16 keep the pipeline as busy as one of 32 keeps the TP group.
    half = Mix(16, 16 * 4096)
    pipelined_s = hybrid.latency_s(half)
    rows = [
        PublishedRow(
            "Figure 13a",
            "Falcon-180B, 32 decodes at 4k",
            "median TBT, TP8 / TP4-PP2",
            wide.latency_s(mix) / pipelined_s,
            published.TP8_OVER_PP_TBT,
        )
    ]
    sarathi = next(
        (
            results[j.key]["qps"]
            for j in capacity_jobs(num_requests, [falcon.model])
            if (j.dataset, j.tbt_s, j.system) == ("sharegpt4", falcon.strict_s, "sarathi")
            and j.key in results
        ),
        None,
    )
    wide_qps = [results.get(job.key, {}).get("qps") for job in tp8_jobs(num_requests)]
    rows += [
        PublishedRow("Figure 13b", f"Falcon-180B, sharegpt4, {slo}", "vllm TP8 capacity, QPS", qps)
        for slo, qps in zip(published.SLOS, wide_qps, strict=True)
        if qps is not None
    ]
    if sarathi and wide_qps[0]:
        rows.append(
            PublishedRow(
                "Figure 13b",
                "Falcon-180B, sharegpt4, strict",
                "sarathi TP4-PP2 / vllm TP8",
                sarathi / wide_qps[0],
                published.SARATHI_OVER_VLLM_TP8,
            )
        )
    return rows


def curve_rows(results: dict[str, dict[str, Any]], num_requests: int) -> list[PublishedRow]:
    """Rows of Figure 12."""
    rows = []
    best_vllm: dict[tuple[str, float], float] = {}
    stated = {(m, s, b): r for m, s, b, r in published.CURVE}
    jobs = [j for j in curve_jobs(num_requests) if j.key in results]
    for job in jobs:
        if job.system == "vllm":
            key = (job.model, job.tbt_s)
            best_vllm[key] = max(best_vllm.get(key, 0.0), results[job.key]["qps"])
    for job in jobs:
        where = f"{job.model}, P99 TBT {job.tbt_s:g} s"
        name = f"{job.system} {job.token_budget if job.system == 'sarathi' else job.max_requests}"
        qps = results[job.key]["qps"]
        rows.append(PublishedRow("Figure 12", where, f"{name} capacity, QPS", qps))
        theirs = stated.get((job.model, job.tbt_s, job.token_budget))
        over = best_vllm.get((job.model, job.tbt_s))
        if job.system == "sarathi" and theirs and over:
            rows.append(PublishedRow("Figure 12", where, f"{name} / best vllm", qps / over, theirs))
    return rows
