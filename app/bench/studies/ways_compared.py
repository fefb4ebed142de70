"""Parts of `legato bench live-ways`: its simulation, its figures, and the order of the ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from app.bench.load.client import Job, Trace
from app.bench.load.figures import load_figures
from app.bench.report import MeasurementError
from app.simulate.hardware.interconnect import Interconnect
from app.simulate.hardware.live_log import LiveStep
from app.simulate.run.deployment import Deployment, Division
from app.simulate.run.recorded import measured_deployment
from app.simulate.run.simulation import simulate
from app.simulate.workload.requests import Workload

EVEN = 0.1  # of the larger value

# Figures, and whether less is better.
FIGURES = {"ttft_p50_ms": True, "ttft_p99_ms": True, "tbt_p99_ms": True, "goodput_qps": False}


@dataclass(frozen=True, slots=True)
class Machine:
    """What the warm-ups say of the machine. steps: by way."""

    config: SchedulerConfig
    profile: CostModel
    steps: Mapping[str, Sequence[LiveStep]]
    link: Interconnect
    token_bytes: float


def deployment_of(way: str, machine: Machine) -> Deployment:
    """Two engines as the live ones of this way are, and KV that moves as it is computed."""
    config = replace(
        machine.config,
        prefix_cache=False,  # live prompts are new
        tier_ranks=0,
        tier_shared=False,
    )
    measured = measured_deployment(config, machine.profile, machine.steps[way])
    division = None
    if way != "colocated":
        division = Division(way, 1, machine.link, machine.token_bytes)
    return replace(measured, num_replicas=2, routing="slack", division=division)


def simulated_figures(
    jobs: Sequence[Job], deployment: Deployment, ttft_ms: float, seed: int = 0
) -> dict[str, float]:
    workload = Workload(
        np.array([job.arrival_s for job in jobs]),
        np.array([job.num_prompt_tokens for job in jobs]),
        np.array([job.num_output_tokens for job in jobs]),
    )
    run = simulate(workload, deployment, seed=seed)
    summary = run.summary(ttft_objective_s=ttft_ms / 1e3)
    found = {
        "ttft_p50_ms": 1e3 * summary.ttft_p50,
        "ttft_p99_ms": 1e3 * summary.ttft_p99,
        "tbt_p50_ms": 1e3 * summary.tbt_p50,
        "tbt_p99_ms": 1e3 * summary.tbt_p99,
        "goodput_qps": summary.goodput,
    }
    if run.handovers is not None:
        found["num_moved"] = float(run.handovers.num_requests)
    return found


def live_figures(
    rounds: Sequence[Sequence[Trace]], tbt_ms: float, ttft_ms: float
) -> dict[str, float]:
    """Means over the rounds. Raises MeasurementError if a request failed."""
    seen = [load_figures(traces, tbt_ms=tbt_ms, ttft_ms=ttft_ms) for traces in rounds]
    for one in seen:
        if one.num_failed:
            raise MeasurementError(f"{one.num_failed} requests failed: {one.first_error}")
    return {name: mean(getattr(one, name) for one in seen) for name in (*FIGURES, "tbt_p50_ms")}


def order(figure: str, by_way: Mapping[str, Mapping[str, float]]) -> str:
    """Which of colocated and split is better by this figure; "even" if they are near."""
    one, other = by_way["colocated"][figure], by_way["split"][figure]
    if abs(one - other) <= EVEN * max(abs(one), abs(other)):
        return "even"
    return "colocated" if (one < other) is FIGURES[figure] else "split"


def orders(
    live: Mapping[str, Mapping[str, float]], simulated: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, str]]:
    """By figure: the order live and simulated, and "same", "opposite" or, where one of them is
    even and the other not, "near"."""
    found = {}
    for figure in FIGURES:
        seen, told = order(figure, live), order(figure, simulated)
        verdict = "same" if seen == told else "near" if "even" in (seen, told) else "opposite"
        found[figure] = {"live": seen, "simulated": told, "verdict": verdict}
    return found
