"""Configuration search: the cheapest deployment that meets the objectives at a load.

Candidates (tensor ranks x stages x policy x budget x admission) are judged in parallel processes by
their capacity; replicas follow from load / capacity, cost from devices x replicas. The cost model
of every degree is composed from operator timings (`hardware.deployments.compose`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from app.simulate.hardware.deployments import compose
from app.simulate.run.capacity import search_capacity
from app.simulate.run.simulation import Deployment, scheduler_config
from app.simulate.workload.lengths import Lengths
from app.simulate.workload.specs import parse_lengths


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve: devices a replica = tensor_ranks x num_stages."""

    model: str
    device: str
    tensor_ranks: int
    num_stages: int
    policy: str = "sarathi"
    budget: str = "adaptive"
    token_budget: int = 512

    @property
    def num_devices(self) -> int:
        return self.tensor_ranks * self.num_stages

    @property
    def label(self) -> str:
        size = f" {self.token_budget}" if self.budget == "fixed" else ""
        return f"TP{self.tensor_ranks} PP{self.num_stages} {self.policy} {self.budget}{size}"


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """A candidate's capacity, and its cost for the load. impossible: why it cannot serve, or ""."""

    candidate: Candidate
    capacity_qps: float
    num_replicas: int
    num_devices: int
    tbt_p99: float
    ttft_p50: float
    limit: str
    impossible: str = ""

    def to_dict(self) -> dict[str, Any]:
        c = self.candidate
        return {
            "tensor_ranks": c.tensor_ranks,
            "num_stages": c.num_stages,
            "policy": c.policy,
            "budget": c.budget,
            "token_budget": c.token_budget,
            "capacity_qps": self.capacity_qps,
            "num_replicas": self.num_replicas,
            "num_devices": self.num_devices,
            "tbt_p99": self.tbt_p99,
            "ttft_p50": self.ttft_p50,
            "limit": self.limit,
            "impossible": self.impossible,
        }


def candidates(
    model: str,
    device: str,
    *,
    tensor_ranks: Sequence[int] = (1, 2, 4, 8),
    num_stages: Sequence[int] = (1, 2, 4),
    policies: Sequence[str] = ("sarathi",),
    budgets: Sequence[tuple[str, int]] = (("adaptive", 512), ("fixed", 512), ("fixed", 2048)),
    max_devices: int = 8,
) -> list[Candidate]:
    """Every combination on at most `max_devices` devices a replica."""
    return [
        Candidate(model, device, ranks, stages, policy, budget, tokens)
        for ranks in tensor_ranks
        for stages in num_stages
        if ranks * stages <= max_devices
        for policy in policies
        for budget, tokens in budgets
    ]


def judge(
    candidate: Candidate,
    lengths: Lengths,
    tbt_s: float,
    load_qps: float,
    num_requests: int = 384,
    seed: int = 0,
) -> CandidateResult:
    """Capacity of one candidate and the replicas that `load_qps` needs."""
    try:
        model = compose(
            candidate.model, candidate.device, candidate.tensor_ranks, candidate.num_stages
        )
    except ValueError as error:
        return CandidateResult(candidate, 0.0, 0, 0, math.nan, math.nan, "", f"{error}")
    config = scheduler_config(
        model,
        policy=candidate.policy,
        budget=candidate.budget,
        token_budget=candidate.token_budget if candidate.budget == "fixed" else None,
        tbt_s=tbt_s,
    )
    found = search_capacity(
        Deployment(config, model),
        lengths,
        tbt_s,
        guess_qps=max(load_qps / 4.0, 0.05),
        num_requests=num_requests,
        tolerance=0.05,
        seed=seed,
    )
    if not found.qps or found.summary is None:
        return CandidateResult(
            candidate, 0.0, 0, 0, math.nan, math.nan, found.limit, "misses the objective"
        )
    replicas = math.ceil(load_qps / found.qps)
    return CandidateResult(
        candidate,
        found.qps,
        replicas,
        replicas * candidate.num_devices,
        found.summary.tbt_p99,
        found.summary.ttft_p50,
        found.limit,
    )


def search_configs(
    options: Sequence[Candidate],
    lengths_name: str,
    tbt_s: float,
    load_qps: float,
    *,
    workers: int = 1,
    num_requests: int = 384,
    on_verdict: Callable[[CandidateResult], None] | None = None,
) -> list[CandidateResult]:
    """Every candidate's verdict, cheapest first (fewest devices, then highest capacity)."""
    verdicts: list[CandidateResult] = []
    arguments = [(c, lengths_name, tbt_s, load_qps, num_requests) for c in options]
    if workers <= 1:
        for item in arguments:
            verdicts.append(_judge_named(*item))
            if on_verdict is not None:
                on_verdict(verdicts[-1])
    else:
        with ProcessPoolExecutor(workers) as pool:
            futures = [pool.submit(_judge_named, *item) for item in arguments]
            for future in as_completed(futures):
                verdicts.append(future.result())
                if on_verdict is not None:
                    on_verdict(verdicts[-1])
    return sorted(verdicts, key=lambda v: (bool(v.impossible), v.num_devices, -v.capacity_qps))


def _judge_named(
    candidate: Candidate, lengths_name: str, tbt_s: float, load_qps: float, num_requests: int
) -> CandidateResult:
    """`judge` with picklable arguments: lengths by name."""
    return judge(candidate, parse_lengths(lengths_name), tbt_s, load_qps, num_requests)
