"""Predictive admission beside tenants at their cap, and with objectives of requests' own."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
        driver.submit(replace(asked, priority=priority))
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
