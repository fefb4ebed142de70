"""The paper's evaluation, simulated: every experiment as a list of rows beside published numbers.

Capacities run in parallel processes and are cached by their settings, so a campaign may be cut
into pieces. Nothing here is fitted to the answer: cost models come from operator timings, policies
are the product's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from actors.scheduling.cost_model import CostModel, Mix
from app.simulate import published
from app.simulate.capacity import MEDIAN_DELAY_LIMIT_S, capacity
from app.simulate.hardware import CONFIGS
from app.simulate.run import Deployment, scheduler_config, simulate
from app.simulate.workload import Lengths, arxiv_summarization, generate, poisson, sharegpt4

LENGTHS: dict[str, Callable[[], Lengths]] = {
    "sharegpt4": sharegpt4,
    "arxiv": arxiv_summarization,
}


@dataclass(frozen=True, slots=True)
class CapacityJob:
    """One capacity search; `key` names its result."""

    model: str
    dataset: str
    tbt_s: float
    system: str
    max_requests: int
    token_budget: int
    guess_qps: float
    num_requests: int
    seed: int = 0
    budget: str = "fixed"
    order: str = "auto"

    @property
    def key(self) -> str:
        extra = "" if self.order == "auto" else f"|{self.order}"
        size = self.token_budget if self.budget == "fixed" else self.budget
        return (
            f"{self.model}|{self.dataset}|{self.tbt_s:g}s|{self.system}|{self.max_requests}"
            f"|{size}|{self.num_requests}|{self.seed}{extra}"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One number of ours beside one of theirs (published may be absent)."""

    figure: str
    setting: str
    quantity: str
    simulated: float
    published: float | None = None

    @property
    def deviation(self) -> float | None:
        """simulated / published - 1."""
        return self.simulated / self.published - 1.0 if self.published else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "deviation": self.deviation}


def load_model(name: str) -> CostModel:
    """A cost model of `configs/hardware`. Raises ValueError naming those there are."""
    path = CONFIGS / f"{name}.json"
    if not path.exists():
        known = sorted(p.stem for p in CONFIGS.glob("*.json"))
        raise ValueError(f"no cost model {name!r}; known: {', '.join(known)}")
    return CostModel.load(path)


# ---- capacities -----------------------------------------------------------------------


def run_job(job: CapacityJob) -> dict[str, Any]:
    """Search one capacity (in a worker process)."""
    model = load_model(job.model)
    # What the product does of itself with an adaptive budget over several stages.
    even = job.budget == "adaptive" and model.num_stages > 1
    config = scheduler_config(
        model,
        policy=job.system,
        budget=job.budget,
        token_budget=job.token_budget,
        tbt_s=job.tbt_s,
        max_requests=job.max_requests,
        order=job.order,
        ttft_s=MEDIAN_DELAY_LIMIT_S if job.order == "deadline" else None,
        micro_batches="uniform" if even else "greedy",
        overlap_chunks=even,
    )
    deployment = Deployment(config, model)
    found = capacity(
        deployment,
        LENGTHS[job.dataset](),
        job.tbt_s,
        guess_qps=job.guess_qps,
        num_requests=job.num_requests,
        seed=job.seed,
    )
    return found.to_dict()


def run_jobs(
    jobs: Sequence[CapacityJob],
    cache: Path | None = None,
    workers: int = 1,
    on_done: Callable[[CapacityJob, dict[str, Any]], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Results by key; those in `cache` (a JSON file) are reused, new ones added as they come."""
    results: dict[str, dict[str, Any]] = {}
    if cache is not None and cache.exists():
        results = json.loads(cache.read_text("utf-8"))
    missing = {job.key: job for job in jobs if job.key not in results}

    def done(job: CapacityJob, result: dict[str, Any]) -> None:
        results[job.key] = result
        if cache is not None:
            cache.parent.mkdir(parents=True, exist_ok=True)
            lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(results.items())]
            cache.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        if on_done is not None:
            on_done(job, result)

    if workers <= 1:
        for job in missing.values():
            done(job, run_job(job))
        return results
    with ProcessPoolExecutor(workers) as pool:
        futures = {pool.submit(run_job, job): job for job in missing.values()}
        for future in as_completed(futures):
            done(futures[future], future.result())
    return results


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


def capacity_rows(results: dict[str, dict[str, Any]], num_requests: int) -> list[Row]:
    """Capacities and their ratios, for every deployment that has results."""
    by = {job.key: job for job in capacity_jobs(num_requests)}
    qps = {
        (j.model, j.dataset, j.tbt_s, j.system): results[k]["qps"]
        for k, j in by.items()
        if k in results
    }
    rows: list[Row] = []
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
                    Row(figure, where, f"{s} capacity, QPS", q)
                    for s, q in zip(published.SYSTEMS, (orca, paged, sarathi), strict=True)
                ]
                theirs = published.OVER_ORCA[d.model][dataset][index]
                rows.append(Row(figure, where, "sarathi / orca", sarathi / orca, theirs))
                rows.append(
                    Row(figure, where, "sarathi / vllm", sarathi / paged, vllm.get((dataset, slo)))
                )
    return rows


def tp8_rows(results: dict[str, dict[str, Any]], num_requests: int) -> list[Row]:
    """Figure 13: tensor parallelism across nodes."""
    falcon = published.DEPLOYMENTS[3]
    hybrid, wide = load_model(falcon.model), load_model("falcon-180b-a100-tp8")
    mix = Mix(32, 32 * 4096)
    # Two micro-batches of 16 keep the pipeline as busy as one of 32 keeps the TP group.
    half = Mix(16, 16 * 4096)
    pipelined_s = hybrid.latency_s(half)
    rows = [
        Row(
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
    job = tp8_jobs(num_requests)[0]
    if sarathi and job.key in results and results[job.key]["qps"]:
        rows.append(
            Row(
                "Figure 13b",
                "Falcon-180B, sharegpt4, strict",
                "sarathi TP4-PP2 / vllm TP8",
                sarathi / results[job.key]["qps"],
                published.SARATHI_OVER_VLLM_TP8,
            )
        )
    return rows


def curve_rows(results: dict[str, dict[str, Any]], num_requests: int) -> list[Row]:
    """Figure 12."""
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
        rows.append(Row("Figure 12", where, f"{name} capacity, QPS", qps))
        theirs = stated.get((job.model, job.tbt_s, job.token_budget))
        over = best_vllm.get((job.model, job.tbt_s))
        if job.system == "sarathi" and theirs and over:
            rows.append(Row("Figure 12", where, f"{name} / best vllm", qps / over, theirs))
    return rows


# ---- single runs and arithmetic -------------------------------------------------------


def ablation_rows(num_requests: int = 128, seeds: Sequence[int] = (0, 1, 2, 3, 4)) -> list[Row]:
    """Table 4: each technique alone and both, Yi-34B, budget 512 (as the artifact ran it)."""
    rows = []
    model = load_model("yi-34b-a100-tp2")
    for dataset, qps in published.ABLATION_QPS.items():
        for policy, theirs in published.ABLATION.items():
            config = scheduler_config(model, policy=policy, token_budget=512)
            ttft, tbt = 0.0, 0.0
            for seed in seeds:
                workload = generate(poisson(qps), LENGTHS[dataset](), num_requests, seed=seed)
                summary = simulate(workload, Deployment(config, model)).summary()
                ttft += summary.ttft_p50 / len(seeds)
                tbt += summary.tbt_p99 / len(seeds)
            where = f"Yi-34B, {dataset}, {policy}"
            rows.append(Row("Table 4", where, "P50 TTFT, s", ttft, theirs[dataset][0]))
            rows.append(Row("Table 4", where, "P99 TBT, s", tbt, theirs[dataset][1]))
    return rows


def interference_rows() -> list[Row]:
    """Figure 9: what a prompt does to the decodes it shares an iteration with (Yi-34B)."""
    model = load_model("yi-34b-a100-tp2")
    rows, worst = [], 0.0
    for num_decodes, context in ((8, 1024), (32, 1024), (32, 4096)):
        alone_s = model.latency_s(Mix(num_decodes, num_decodes * context))
        for prompt in (4096, 8192):
            whole, chunked = (Mix(num_decodes, num_decodes * context) for _ in range(2))
            whole.add(0, prompt)
            chunked.add(prompt - 512 + num_decodes, 512 - num_decodes)
            where = f"Yi-34B, {num_decodes} decodes at {context}, prompt {prompt}"
            ratio = model.latency_s(whole) / alone_s
            worst = max(worst, ratio)
            rows.append(Row("Figure 9", where, "whole prompt / decode-only", ratio))
            rows.append(
                Row(
                    "Figure 9",
                    where,
                    "chunk of 512 / decode-only",
                    model.latency_s(chunked) / alone_s,
                )
            )
    rows.append(
        Row("Figure 9", "largest", "whole prompt / decode-only", worst, published.INTERFERENCE)
    )
    return rows


def chunking_rows() -> list[Row]:
    """Figure 14: prefill time of a chunked prompt over that of a whole one (Yi-34B)."""
    model = load_model("yi-34b-a100-tp2")
    rows = []
    for prompt, measured in published.CHUNKING_MS.items():
        whole_s = _chunked_s(model, prompt, prompt)
        for chunk in (512, 1024, 2048):
            theirs = measured[chunk] / measured[16384]
            ours = _chunked_s(model, prompt, chunk) / whole_s
            rows.append(
                Row(
                    "Figure 14",
                    f"Yi-34B, prompt {prompt}, chunk {chunk}",
                    "time / whole",
                    ours,
                    theirs,
                )
            )
    return rows


def _chunked_s(model: CostModel, prompt: int, chunk: int) -> float:
    total_s = 0.0
    for start in range(0, prompt, chunk):
        mix = Mix()
        mix.add(start, min(chunk, prompt - start), model.attention_window)
        total_s += model.latency_s(mix)
    return total_s


def validation_rows() -> list[Row]:
    """The composed Yi-34B cost model against steps that the paper's artifact measured."""
    model = load_model("yi-34b-a100-tp2")
    rows = []
    for prompt, ms in published.PREFILL_MS.items():
        ours = _chunked_s(model, prompt, prompt) * 1e3
        rows.append(Row("Artifact", f"Yi-34B, prefill of {prompt}", "step, ms", ours, ms))
    for batch, ms in published.DECODE_MS.items():
        ours = model.latency_s(Mix(batch, batch * 1024)) * 1e3
        rows.append(Row("Artifact", f"Yi-34B, {batch} decodes at 1024", "step, ms", ours, ms))
    return rows


def calibrated_to_artifact(model: CostModel) -> CostModel:
    """`model` with the per-step and per-request cost that the artifact's decode steps show.

    The measured decode steps exceed the sum of their operators by a constant and by about a
    millisecond a request: the cost of that implementation's Python. Used as a sensitivity check.
    """
    import numpy as np

    from app.simulate.fit import nnls

    batches = np.array(sorted(published.DECODE_MS), float)
    measured = np.array([published.DECODE_MS[int(b)] / 1e3 for b in batches])
    bare = replace(model, overhead_s=0.0, per_request_s=0.0)
    operators = np.array([bare.latency_s(Mix(int(b), int(b) * 1024)) for b in batches])
    matrix = np.stack([np.ones_like(batches), batches], axis=1)
    weights = 1.0 / measured
    overhead_s, per_request_s = nnls(
        matrix * weights[:, None], (measured - operators) * weights
    ).tolist()
    note = "Overheads calibrated to decode steps measured by the paper's artifact."
    return replace(
        model,
        name=f"{model.name}-artifact",
        overhead_s=overhead_s,
        per_request_s=per_request_s,
        notes=(*model.notes, note),
    )
