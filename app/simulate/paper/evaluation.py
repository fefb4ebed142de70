"""The paper's evaluation as a whole: which capacities it needs, and the rows beside its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.simulate.paper import capacities, costs, motivation, published, steps
from app.simulate.run.campaign import CapacityJob
from app.simulate.workload.specs import names_file, parse_lengths

# A short run flatters every policy: the queue never has time to build up.
QUICK_REQUESTS, FULL_REQUESTS = 384, 768


def parse_traces(texts: Sequence[str]) -> dict[str, str]:
    """`DATASET=FILE` as a mapping. Raises ValueError naming the datasets, OSError for no file."""
    traces = {}
    for text in texts:
        dataset, _, file = text.partition("=")
        if dataset not in published.DATASETS or not names_file(file):
            known = ", ".join(published.DATASETS)
            raise ValueError(f"--trace {text}: use DATASET=FILE with one of {known}")
        parse_lengths(file)
        traces[dataset] = file
    return traces


def plan(quick: bool, traces: Mapping[str, str]) -> tuple[int, list[CapacityJob]]:
    """Requests of a probe, and the capacity searches; quick: two models under one objective.

    traces: files of recorded lengths, by the dataset in whose place they stand.
    """
    num_requests, jobs = _plan(quick)
    return num_requests, [replace(job, lengths=traces.get(job.dataset, "")) for job in jobs]


def _plan(quick: bool) -> tuple[int, list[CapacityJob]]:
    if not quick:
        jobs = capacities.capacity_jobs(FULL_REQUESTS) + capacities.tp8_jobs(FULL_REQUESTS)
        return FULL_REQUESTS, jobs + capacities.curve_jobs(FULL_REQUESTS)
    strict_s = {d.model: d.strict_s for d in published.DEPLOYMENTS}
    jobs = [
        job
        for job in capacities.capacity_jobs(QUICK_REQUESTS, ("mistral-7b-a100", "yi-34b-a100-tp2"))
        if job.dataset == "sharegpt4" and job.tbt_s == strict_s[job.model]
    ]
    return QUICK_REQUESTS, jobs


def rows(
    results: dict[str, dict[str, Any]],
    num_requests: int,
    quick: bool,
    traces: Mapping[str, str],
) -> list[published.PublishedRow]:
    """Rows of all figures. results: of the planned searches, as `run_jobs` returns them."""
    found = motivation.motivation_rows(traces) + costs.cost_rows()
    found += steps.validation_rows() + steps.interference_rows() + steps.chunking_rows()
    found += steps.ablation_rows(seeds=(0,) if quick else range(5), traces=traces)
    found += capacities.capacity_rows(results, num_requests)
    if not quick:
        found += capacities.tp8_rows(results, num_requests)
        found += capacities.curve_rows(results, num_requests)
    return found
