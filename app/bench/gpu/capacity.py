"""Capacity under P99 TBT for every policy: found by the simulator, confirmed on the GPU.

A search by trial would hold the GPU for hours. So the cost model is fitted to this GPU's own step
times, the simulator searches with the real scheduling core, which needs no GPU, and each capacity
is then tried live at the load found.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from actors.scheduling.cost.model import CostModel
from app.bench.engine.stage import LoadedStage
from app.bench.gpu.live import LiveRun
from app.simulate.run.capacity import search_capacity
from app.simulate.run.simulation import Deployment, scheduler_config
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import sharegpt4
from app.simulate.workload.requests import generate
from app.simulate.workload.specs import TrafficSpec

FIXED = (512, 1024, 2048)
_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Contender:
    """max_requests: of a batch; as in the paper few where memory is reserved for the longest
    output. token_budgets: fixed ones, of which the best counts; none for the adaptive budget.
    Policies that read whole prompts take one, as it limits nothing."""

    policy: str
    max_requests: int = 128
    token_budgets: tuple[int, ...] = ()


CONTENDERS = (
    Contender("faster_transformer", 16, FIXED[:1]),
    Contender("orca", 16, FIXED[:1]),
    Contender("vllm", 128, FIXED[:1]),
    Contender("hybrid_only", 128, FIXED[:1]),
    Contender("chunked_only", 128, FIXED),
    Contender("sarathi", 128, FIXED),
    Contender("sarathi"),
    Contender("deadline"),
    Contender("fair"),
    Contender("mlfq"),
)


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """simulated_qps: highest load that passes in the simulator, at the best of the budgets.

    model: the cost model's name. token_budget: None for the default one. live_tbt_p99_ms:
    measured on the GPU at that load; None where it was not tried.
    """

    model: str
    policy: str
    tbt_ms: float
    token_budget: int | None
    max_requests: int
    simulated_qps: float
    limit: str
    live_tbt_p99_ms: float | None = None
    live_delay_p50_s: float | None = None
    live_passed: bool | None = None


def search_capacities(
    model: CostModel,
    objectives_ms: Sequence[float],
    num_requests: int,
    contenders: Sequence[Contender] = CONTENDERS,
) -> Iterator[CapacityRow]:
    """Capacity of every contender under every objective, by the simulator, on all cores."""
    # Not forked: the parent may hold a GPU.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        searches = [
            [
                pool.submit(_search, model, contender, budget, tbt_ms, num_requests)
                for budget in contender.token_budgets or (None,)
            ]
            for tbt_ms in objectives_ms
            for contender in contenders
        ]
        for tried in searches:
            yield max((one.result() for one in tried), key=lambda row: row.simulated_qps)


def _search(
    model: CostModel, contender: Contender, budget: int | None, tbt_ms: float, num_requests: int
) -> CapacityRow:
    config = scheduler_config(
        model, policy=contender.policy, budget="auto" if budget is None else "fixed",
        token_budget=budget, tbt_s=tbt_ms / 1000, max_requests=contender.max_requests,
    )  # fmt: skip
    found = search_capacity(
        Deployment(config, model), TrafficSpec("sharegpt4", num_requests=num_requests).read(),
        tbt_ms / 1000, guess_qps=4.0, tolerance=_TOLERANCE,
    )  # fmt: skip
    return CapacityRow(
        model.name, contender.policy, tbt_ms, budget, contender.max_requests, found.qps, found.limit
    )


def confirm(row: CapacityRow, model: CostModel, stage: LoadedStage, live_s: float) -> CapacityRow:
    """The row, tried on the stage at its load for `live_s` of arrivals."""
    config = scheduler_config(
        model,
        policy=row.policy,
        budget="auto" if row.token_budget is None else "fixed",
        token_budget=row.token_budget,
        tbt_s=row.tbt_ms / 1000,
        max_requests=row.max_requests,
        block_size=stage.spec.block_size,
        max_step_tokens=stage.spec.max_step_tokens,
        lookahead=True,  # as the live engine runs
    )
    count = max(8, int(row.simulated_qps * live_s))
    workload = generate(poisson(1.0), sharegpt4(), count, seed=1).at_rate(row.simulated_qps)
    summary = LiveRun(stage.runner, config, workload).run(give_up_after_s=3 * live_s)
    passed = (
        summary.tbt_p99 <= row.tbt_ms / 1000
        and summary.scheduling_delay_p50 <= 2.0
        and summary.num_completed == len(workload)
    )
    return replace(
        row,
        live_tbt_p99_ms=1000 * summary.tbt_p99,
        live_delay_p50_s=summary.scheduling_delay_p50,
        live_passed=passed,
    )
