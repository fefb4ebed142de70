"""Feedback levels: a request of a better level waits for none of a worse one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.short_lives import config, request

LEVELS = {"policy": "mlfq", "max_model_len": 600, "order_options": {"quantum_tokens": 4}}


def steps_to_first_token(driver: Driver, number: int) -> int:
    count = 0
    while driver.callers[number].first is None:
        driver.answer()
        count += 1
    return count


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize(
    "scarce",
    [
        {"policy_options": {"max_batch": 2}, "num_blocks": 400},
        {"max_requests": 2, "num_blocks": 400},
        {"num_blocks": 48, "watermark": 0.0, "max_model_len": 100},
    ],
    ids=["batch", "slots", "memory"],
)
def test_a_short_prompt_waits_for_no_worse_level(
    num_stages: int, lookahead: bool, scarce: dict[str, Any]
) -> None:
    driver = Driver(config(**(LEVELS | scarce), num_stages=num_stages, lookahead=lookahead))
    for number in range(2):
        driver.submit(request(number, prompt=40, output=55, arrival_s=driver.now_s))
    while any(s.num_output_tokens < 40 for s in driver.core.live_requests.values()):
        driver.answer()
    assert len(driver.core.live_requests) == 2
    driver.submit(request(9, prompt=36, output=2, arrival_s=driver.now_s))
    assert steps_to_first_token(driver, 9) <= 7 * num_stages
    driver.drain()


def test_a_batch_holds_no_more_than_its_most() -> None:
    driver = Driver(config(**LEVELS, policy_options={"max_batch": 2}, num_blocks=400))
    for number in range(8):
        driver.submit(request(number, prompt=3, output=40, arrival_s=driver.now_s))
    driver.drain()
    assert max(len(plan.named_slices) for plan in driver.plans) == 2


def test_while_admission_keeps_the_head_waiting_the_last_of_the_batch_goes_on() -> None:
    settings = LEVELS | {"policy_options": {"max_batch": 2}, "admission": "predicted_peak"}
    driver = Driver(config(**settings, num_blocks=34))
    for number in range(2):
        driver.submit(request(number, prompt=3, output=60, arrival_s=driver.now_s))
    for _ in range(20):
        driver.answer()
    driver.submit(request(9, prompt=3, output=60, arrival_s=driver.now_s))
    for _ in range(10):
        assert len(driver.plans[-1].named_slices) == 2
        driver.answer()
    assert driver.callers[9].first is None
    driver.drain()
