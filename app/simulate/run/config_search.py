"""Configuration search: the cheapest kind of engine that meets the objectives at a load.

Candidates (tensor ranks x stages x policy x budget x admission) are judged in parallel processes by
their capacity; replicas follow from load / capacity, cost from devices x replicas. The cost model
of every degree is composed from operator timings (`hardware.deployments.compose`); a cost model
that is given instead has one degree. `ways_search` asks where on given hardware the work runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from app.simulate.hardware.deployments import compose, load_model
from app.simulate.hardware.model_config import shape_at
from app.simulate.hardware.shapes import DEVICES, MODELS
from app.simulate.run.capacity import probe_load, search_capacity
from app.simulate.run.processes import each
from app.simulate.run.simulation import Deployment, scheduler_config
from app.simulate.run.work import Work
from app.simulate.workload.specs import TrafficSpec


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kind of engine: devices a replica = tensor_ranks x num_stages.

    model: a name of `MODELS`, or a model's folder or its config.json. device: "": model is the name
    or file of a cost model.
    """

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

    def cost_model(self) -> CostModel:
        """Raises ValueError for what has no published timings, and if the weights do not fit."""
        if not self.device:
            return load_model(self.model)
        shape = None if self.model in MODELS else shape_at(self.model)
        return compose(shape or self.model, self.device, self.tensor_ranks, self.num_stages)

    def config(self, model: CostModel, tbt_s: float) -> SchedulerConfig:
        return scheduler_config(
            model,
            policy=self.policy,
            budget=self.budget,
            token_budget=self.token_budget if self.budget == "fixed" else None,
            tbt_s=tbt_s,
            overlap_chunks=True,  # as the engine does
        )


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


BUDGETS = (("adaptive", 512), ("fixed", 512), ("fixed", 2048))


def candidates(
    target: str,
    *,
    tensor_ranks: Sequence[int] = (1, 2, 4, 8),
    num_stages: Sequence[int] = (1, 2, 4),
    policies: Sequence[str] = ("sarathi",),
    budgets: Sequence[tuple[str, int]] = BUDGETS,
    max_devices: int = 8,
) -> list[Candidate]:
    """Every combination on at most `max_devices` devices a replica.

    target: `MODEL/DEVICE` (MODEL: on an A100; it may be a folder), or the name or file of a cost
    model. Raises ValueError or OSError for one that is not there.
    """
    model, device = divided(target)
    if not device:
        known = load_model(model)
        degrees = [(known.tensor_ranks, known.num_stages)]
    else:
        degrees = [(r, s) for r in tensor_ranks for s in num_stages if r * s <= max_devices]
    return [
        Candidate(model, device, ranks, stages, policy, budget, tokens)
        for ranks, stages in degrees
        for policy in policies
        for budget, tokens in budgets
    ]


def divided(target: str) -> tuple[str, str]:
    """Model and device of a search's target; no device: it is a cost model. A folder's name may
    hold slashes, too. Raises OSError or ValueError for a folder that describes no model."""
    model, _, device = target.rpartition("/")
    for name, of in ((target, "a100"), (model, device)):
        if name in MODELS or (name and of in DEVICES and shape_at(name) is not None):
            return name, of
    if target.endswith(".json") or "/" not in target:
        return target, ""
    return model, device


def is_cost_model(target: str) -> bool:
    """Whether a target of a search is a cost model, and not MODEL/DEVICE."""
    return not divided(target)[1]


def judge(
    candidate: Candidate,
    traffic: TrafficSpec,
    tbt_s: float,
    load_qps: float,
    least_qps: float = 0.0,
) -> CandidateResult:
    """Capacity of one candidate and the replicas that `load_qps` needs. least_qps: a candidate that
    does not hold it is not searched."""
    try:
        model = candidate.cost_model()
    except ValueError as error:
        return CandidateResult(candidate, 0.0, 0, 0, math.nan, math.nan, "", f"{error}")
    served = traffic.read()
    deployment = Deployment(candidate.config(model, tbt_s), model)
    guess_qps, stride = Work.of(model, served.at(1.0)).qps(0, 1), 2.0
    if least_qps:
        least, at = served.at(least_qps), (least_qps, tbt_s)
        if not probe_load(deployment, least, *at, seed=served.seed)[0].passed:
            reason = f"does not hold {least_qps:.3g} requests/s"
            return CandidateResult(candidate, 0.0, 0, 0, math.nan, math.nan, "", reason)
        guess_qps, stride = 1.25 * least_qps, 1.25
    found = search_capacity(
        deployment, served, tbt_s, guess_qps=guess_qps, stride=stride, tolerance=0.05
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
    traffic: TrafficSpec,
    tbt_s: float,
    load_qps: float,
    workers: int = 1,
    on_verdict: Callable[[], None] | None = None,
) -> list[CandidateResult]:
    """Every candidate's verdict, cheapest first (fewest devices, then highest capacity)."""
    asked = [(candidate, traffic, tbt_s, load_qps) for candidate in options]
    verdicts = each(judge, asked, workers, on_verdict)
    return sorted(verdicts, key=lambda v: (bool(v.impossible), v.num_devices, -v.capacity_qps))
