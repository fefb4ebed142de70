"""Capacity under P99 TBT for every policy: found by the simulator, confirmed on the GPU.

A search by trial would hold the GPU for hours. So the cost model is fitted to this GPU's own step
times, the simulator searches with the real scheduling core, and each capacity is then tried
live at the load found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from actors.scheduling.cost.model import CostModel
from app.bench.engine.stage import LoadedStage
from app.bench.gpu.live import LiveRun
from app.simulate.run.capacity import search_capacity
from app.simulate.run.simulation import Deployment, scheduler_config
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import sharegpt4
from app.simulate.workload.requests import generate

# Requests a batch may hold: as in the paper, where Orca's reserved memory holds few.
POLICIES: tuple[tuple[str, int], ...] = (
    ("faster_transformer", 16),
    ("orca", 16),
    ("vllm", 128),
    ("hybrid_only", 128),
    ("chunked_only", 128),
    ("sarathi", 128),
    ("fair", 128),
    ("mlfq", 128),
    ("deadline", 128),
)
_BUDGETS = (512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """simulated_qps: highest load that passes in the simulator, at the best of the budgets.

    model: the cost model's name. live_tbt_p99_ms: measured on the GPU at that load; None where
    it was not tried.
    """

    model: str
    policy: str
    tbt_ms: float
    token_budget: int
    simulated_qps: float
    limit: str
    live_tbt_p99_ms: float | None = None
    live_delay_p50_s: float | None = None
    live_passed: bool | None = None


def capacities(
    model: CostModel,
    objectives_ms: Sequence[float],
    num_requests: int,
    stage: LoadedStage | None = None,
    live_s: float = 20.0,
    policies: Sequence[tuple[str, int]] = POLICIES,
) -> Iterator[CapacityRow]:
    """Capacity of every policy under every objective; confirmed live where a stage is given."""
    for tbt_ms in objectives_ms:
        for policy, max_requests in policies:
            row = _search(model, policy, max_requests, tbt_ms, num_requests)
            if stage is not None and row.simulated_qps > 0:
                row = _confirm(row, model, stage, max_requests, live_s)
            yield row


def _search(
    model: CostModel, policy: str, max_requests: int, tbt_ms: float, num_requests: int
) -> CapacityRow:
    best = CapacityRow(model.name, policy, tbt_ms, 0, 0.0, "never tried")
    for budget in _BUDGETS:
        config = scheduler_config(
            model, policy=policy, token_budget=budget, tbt_s=tbt_ms / 1000,
            max_requests=max_requests,
        )  # fmt: skip
        found = search_capacity(
            Deployment(config, model), sharegpt4(), tbt_ms / 1000, guess_qps=4.0,
            num_requests=num_requests, tolerance=0.05,
        )  # fmt: skip
        if found.qps > best.simulated_qps or not best.token_budget:
            best = CapacityRow(model.name, policy, tbt_ms, budget, found.qps, found.limit)
    return best


def _confirm(
    row: CapacityRow, model: CostModel, stage: LoadedStage, max_requests: int, live_s: float
) -> CapacityRow:
    config = scheduler_config(
        model,
        policy=row.policy,
        token_budget=row.token_budget,
        tbt_s=row.tbt_ms / 1000,
        max_requests=max_requests,
        block_size=stage.spec.block_size,
        max_step_tokens=stage.spec.max_step_tokens,
        lookahead=True,  # as the live engine runs
    )
    count = max(8, int(row.simulated_qps * live_s))
    workload = generate(poisson(1.0), sharegpt4(), count, seed=1).at_rate(row.simulated_qps)
    summary = LiveRun(stage.runner, config, workload).run(give_up_after_s=3 * live_s)
    passed = summary.tbt_p99 <= row.tbt_ms / 1000 and summary.scheduling_delay_p50 <= 2.0
    return replace(
        row,
        live_tbt_p99_ms=1000 * summary.tbt_p99,
        live_delay_p50_s=summary.scheduling_delay_p50,
        live_passed=passed,
    )
