"""Predictive admission beside tenants at their cap, and with objectives of requests' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from actors.scheduling.request import Objective
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.short_lives import config, request

COSTS = {"name": "toy", "tokens_s": [[1, 0.010], [64, 0.042]], "per_request_s": 0.001}
SETTINGS = {
    "num_blocks": 2000,
    "max_requests": 16,
    "max_model_len": 400,
    "budget": "adaptive",
    "token_budget": None,
    "cost_model": COSTS,
    "admission": "predictive",
}


@pytest.mark.parametrize("order", ["auto", "fair", "deadline"])
@pytest.mark.parametrize("priority", [0, -1])
@pytest.mark.parametrize("cap", [1, 3])
def test_what_waits_for_its_tenants_cap_makes_nobody_else_refused(
    order: str, priority: int, cap: int
) -> None:
    limits = {"tbt_s": 0.06, "ttft_s": 3.0, "max_running_per_tenant": cap, "order": order}
    driver = Driver(config(**(SETTINGS | limits)))
    for number in range(60):
        asked = request(number, prompt=100, output=60, tenant="greedy", arrival_s=driver.now_s)
        # It waits longer than others would, else few of these were accepted.
        driver.submit(replace(asked, priority=priority, objective=Objective(ttft_s=9.0)))
    for number in range(1000, 1008):
        for _ in range(20):
            driver.answer()
        driver.submit(request(number, output=4, tenant=f"other{number}", arrival_s=driver.now_s))
        assert driver.callers[number].refused is None
        for _ in range(4):
            driver.answer()
        assert driver.callers[number].first is not None
    assert any(caller.refused for caller in driver.callers.values())  # its own waiting counts
    driver.drain()


@pytest.mark.parametrize(("first_s", "expected"), [(1.0, [16]), (None, range(1, 10))])
def test_as_many_run_as_the_tightest_of_their_objectives_allows(
    first_s: float | None, expected: Sequence[int]
) -> None:
    """The deployment's is for requests without one of their own: 20 ms allow few of 11 ms."""
    driver = Driver(config(**SETTINGS, tbt_s=0.02))
    for number in range(16):
        objective = Objective(tbt_s=1.0 if number else first_s, ttft_s=60.0)
        driver.submit(request(number, prompt=8, output=60, arrival_s=0.0, objective=objective))
    most = 0
    while 0 in driver.core.live_requests:
        driver.answer()
        most = max(most, driver.core.requests.running.num_requests)
    assert most in expected
    driver.drain()
