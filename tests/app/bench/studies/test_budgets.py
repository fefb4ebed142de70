"""Searches side by side: a load of each budget in turn, and each by its own results."""

from __future__ import annotations

import asyncio

from app.bench.load.capacity import CapacityObjective, CapacitySearch
from app.bench.load.client import Job, Trace
from app.bench.load.figures import LoadFigures, load_figures
from app.bench.load.workload import Load
from app.bench.studies.budgets import BudgetSearch, budget_changes, search_round

HELD_QPS = {"auto": 3.0, "64": 1.0}


def test_every_budget_is_searched_beside_the_others() -> None:
    served: list[str] = []

    async def serve(budget: str, load: Load) -> LoadFigures:
        served.append(budget)
        gap_s = 0.05 if load.qps <= HELD_QPS[budget] else 0.2
        times_s = [0.1 + n * gap_s for n in range(4)]
        trace = Trace(Job(0.0, 64, 4), num_tokens=4, event_times_s=times_s)
        return load_figures([trace], tbt_ms=100.0)

    searches = [BudgetSearch(budget, CapacitySearch(2.0, 0.05)) for budget in HELD_QPS]
    load = Load("64x8", 2.0, 5.0)
    next_run = asyncio.run(search_round(serve, searches, load, CapacityObjective(100.0), 1))
    auto, fixed = searches
    assert auto.search.low_qps <= 3.0 < auto.search.high_qps
    assert fixed.search.low_qps <= 1.0 < fixed.search.high_qps
    assert served[:4] == ["auto", "64"] * 2
    numbers = sorted([*auto.runs, *fixed.runs])
    assert numbers == list(range(1, next_run))
    assert [served[n - 1] for n in auto.runs] == ["auto"] * len(auto.probes)


def test_auto_has_no_number_of_tokens() -> None:
    assert budget_changes("auto", 100.0) == {"budget": "auto", "token_budget": None, "tbt_ms": 100}
    assert budget_changes("64", 50.0)["token_budget"] == 64
