"""Many capacity searches in parallel processes, cached by their settings and their trace's content.

An interrupted campaign can be resumed: finished searches are not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.simulate.hardware.deployments import load_model
from app.simulate.run.capacity import MEDIAN_DELAY_LIMIT_S, search_capacity
from app.simulate.run.simulation import Deployment, scheduler_config
from app.simulate.workload.specs import TrafficSpec, digest_of


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
    lengths: str = ""  # a trace that replaces the dataset's lengths

    @property
    def cache_key(self) -> str:
        if not self.lengths:
            return self.key
        return f"{self.key}|{self.lengths}|{digest_of(self.lengths)}"

    @property
    def key(self) -> str:
        extra = "" if self.order == "auto" else f"|{self.order}"
        size = self.token_budget if self.budget == "fixed" else self.budget
        return (
            f"{self.model}|{self.dataset}|{self.tbt_s:g}s|{self.system}|{self.max_requests}"
            f"|{size}|{self.num_requests}|{self.seed}{extra}"
        )


def run_job(job: CapacityJob) -> dict[str, Any]:
    """Search one capacity (in a worker process)."""
    model = load_model(job.model)
    # An adaptive budget over several stages spreads the work, and a prompt's chunks follow each
    # other; the baselines do neither.
    even = job.budget == "adaptive" and model.num_stages > 1
    config = scheduler_config(
        model,
        policy=job.system,
        budget=job.budget,
        token_budget=job.token_budget if job.budget == "fixed" else None,
        tbt_s=job.tbt_s,
        max_requests=job.max_requests,
        order=job.order,
        ttft_s=MEDIAN_DELAY_LIMIT_S if job.order == "deadline" else None,
        micro_batches="uniform" if even else "greedy",
        overlap_chunks=even,
    )
    deployment = Deployment(config, model)
    found = search_capacity(
        deployment,
        TrafficSpec(job.lengths or job.dataset, "poisson", job.num_requests, job.seed).read(),
        job.tbt_s,
        guess_qps=job.guess_qps,
    )
    return found.to_dict()


def run_jobs(
    jobs: Sequence[CapacityJob],
    cache: Path | None = None,
    workers: int = 1,
    on_done: Callable[[CapacityJob, dict[str, Any]], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Results by key. Results in `cache` (a JSON file) are reused; new ones are added as they
    complete."""
    cached: dict[str, dict[str, Any]] = {}
    if cache is not None and cache.exists():
        cached = json.loads(cache.read_text("utf-8"))
    names = {job.key: job.cache_key for job in jobs}
    results = {key: cached[name] for key, name in names.items() if name in cached}
    missing = {job.key: job for job in jobs if job.key not in results}

    def done(job: CapacityJob, result: dict[str, Any]) -> None:
        results[job.key] = cached[names[job.key]] = result
        if cache is not None:
            cache.parent.mkdir(parents=True, exist_ok=True)
            lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(cached.items())]
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
