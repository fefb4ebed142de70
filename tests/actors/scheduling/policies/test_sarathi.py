"""Stall-free batches: every decode, then chunks up to the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.actors.scheduling.driver import Driver, expected_output
from tests.actors.scheduling.short_lives import config, request, slices

STALL_FREE = ("sarathi", "fair", "deadline", "shortest_first")


@pytest.mark.parametrize("length", [1, 17, 60])
@pytest.mark.parametrize("budget", [4, 5, 16])
def test_no_prompt_stalls_a_decode(length: int, budget: int) -> None:
    driver = Driver(config(token_budget=budget))
    for number in range(4):
        driver.submit(request(number, prompt=3, output=30))
    while len(driver.core.requests.decoding) < 4:
        driver.answer()
    driver.submit(request(9, prompt=length, output=4))
    before = len(driver.plans)
    for _ in range(10):
        driver.answer()
    for plan in driver.plans[before:]:
        assert {0, 1, 2, 3} <= {part.request_id for part in plan.named_slices}
        # decodes alone may exceed the budget, a chunk never does
        assert plan.num_tokens <= max(budget, sum(p.num_tokens == 1 for p in plan.named_slices))
    if budget <= 4:  # no room for a chunk beside four decodes, and none is forced
        assert all(
            part.request_id != 9 for plan in driver.plans[before:] for part in plan.named_slices
        )
    driver.drain()


def test_dynamic_chunks_fall_as_a_prompt_progresses() -> None:
    options = {"chunks": "dynamic", "high": 64, "low": 32, "num_sizes": 2, "span": 256}
    driver = Driver(
        config(
            num_blocks=200,
            max_model_len=512,
            max_step_tokens=128,
            policy_options=options,
            token_budget=1,
        )
    )
    driver.submit(request(1, prompt=300, output=1))
    driver.drain()
    assert [plan.num_tokens for plan in driver.plans] == [64, 64] + [32] * 5 + [12]


def test_chunks_are_cut_to_tiles() -> None:
    driver = Driver(config(token_budget=15, tile=4))
    driver.submit(request(1, prompt=2, output=20))
    driver.answer()
    driver.submit(request(2, prompt=30, output=2))
    driver.drain()
    assert [plan.num_tokens for plan in driver.plans[2:5]] == [12, 12, 9]  # 1 + 11, 1 + 11, 1 + 8


def test_long_prompts_share_a_step_with_short_ones() -> None:
    driver = Driver(config(token_budget=16, max_chunk=6))
    driver.submit(request(0, prompt=1, output=2))  # keeps the step busy while others arrive
    driver.submit(request(1, prompt=60, output=2))
    driver.submit(request(2, prompt=6, output=2))
    driver.submit(request(3, prompt=3, output=2))
    driver.answer()
    # the cap gives all three a share; what is left goes back to the first
    assert [(s[0], s[2]) for s in slices(driver, 1)] == [(0, 1), (1, 6), (2, 6), (3, 3)]
    driver.answer()
    assert [(s[0], s[2]) for s in slices(driver, 2)] == [(2, 1), (3, 1), (1, 14)]
    driver.drain()


@pytest.mark.parametrize("policy", STALL_FREE)
def test_a_priority_below_0_lets_others_go_first(policy: str) -> None:
    driver = Driver(config(token_budget=8, policy=policy))
    driver.submit(request(0, prompt=8, output=1))  # keeps the step busy while others arrive
    for number, priority in enumerate((-1000, 0, -1000, 0, 5), 1):
        driver.submit(replace(request(number, prompt=8, output=1), priority=priority))
    driver.drain()
    assert [plan.named_slices[0].request_id for plan in driver.plans] == [0, 2, 4, 5, 1, 3]


def test_a_stream_begun_elsewhere_goes_before_prompts() -> None:
    """A prompt that runs would otherwise take the budget of many steps."""
    driver = Driver(config(token_budget=8, max_chunk=None))
    driver.submit(request(1, prompt=60, output=1))
    driver.answer()
    tokens, _ = expected_output(request(2, prompt=5, output=4), 64)
    driver.submit(request(2, prompt=5, output=4, done=tuple(tokens[:1])))
    before = len(driver.plans)
    driver.answer()
    driver.answer()
    parts = [
        (p.request_id, p.num_tokens) for plan in driver.plans[before:] for p in plan.named_slices
    ]
    assert (2, 6) in parts[:3]
    assert parts.index((2, 6)) < parts.index((1, 2))
    driver.drain()


@pytest.mark.parametrize("policy", STALL_FREE)
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("micro_batches", ["greedy", "uniform"])
@pytest.mark.parametrize("missing", ["slot", "memory"])
def test_a_live_request_takes_the_place_of_a_background_one(
    policy: str, num_stages: int, micro_batches: str, missing: str
) -> None:
    most, num_blocks = (2, 40) if missing == "slot" else (8, 18)
    driver = Driver(
        config(
            max_requests=most, num_blocks=num_blocks, num_stages=num_stages,
            micro_batches=micro_batches, policy=policy,
        )
    )  # fmt: skip
    for number in range(2):
        driver.submit(replace(request(number, prompt=28, output=8), priority=-1000))
    for _ in range(5):
        driver.answer()
    assert len(driver.core.view.decoding) == 2
    driver.submit(request(9, prompt=12, output=3))
    while 9 in driver.core.live_requests:
        driver.answer()
    assert driver.core.num_preemptions == 1
    assert 1 in driver.core.live_requests  # it came first
    driver.drain()  # which compares all tokens


def test_a_background_request_gives_way_as_often_as_a_live_one_needs_its_place() -> None:
    driver = Driver(config(max_requests=2))
    driver.submit(request(0, prompt=4, output=50))
    driver.submit(replace(request(1, prompt=4, output=40), priority=-1000))
    for number in range(2, 5):
        for _ in range(6):
            driver.answer()
        assert [s.request_id for s in driver.core.requests.decoding] == [0, 1]
        driver.submit(request(number, prompt=4, output=2))
        for _ in range(5):
            driver.answer()
        assert number not in driver.core.live_requests
    assert driver.core.num_preemptions == 3
    driver.drain()


def test_one_that_has_waited_longer_than_its_priority_says_keeps_its_place() -> None:
    driver = Driver(config(max_requests=1))
    driver.submit(replace(request(0, prompt=12, output=30), priority=-1))
    driver.answer()
    driver.now_s += 20.0
    driver.submit(request(1, prompt=12, output=6, arrival_s=20.0))
    driver.drain()
    assert driver.core.num_preemptions == 0


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_live_request_takes_the_place_of_its_own_tenants_batch(num_stages: int) -> None:
    driver = Driver(config(max_running_per_tenant=2, num_stages=num_stages, num_blocks=100))
    for number in range(3):
        asked = request(number, prompt=8, output=40, tenant="a")
        driver.submit(replace(asked, priority=-1000))
        driver.submit(request(10 + number, prompt=8, output=40, tenant=f"other{number}"))
    for _ in range(9):
        driver.answer()
    driver.submit(request(9, prompt=12, output=3, tenant="a"))
    while 9 in driver.core.live_requests:
        driver.answer()
    assert driver.core.num_preemptions == 1
    assert {0, 1, 2, 10, 11, 12} <= set(driver.core.live_requests)
    driver.drain()


def test_one_at_its_tenants_cap_takes_memory_of_other_tenants_background_too() -> None:
    driver = Driver(config(max_running_per_tenant=1, num_blocks=32, watermark=0.0, token_budget=64))
    for number, prompt in enumerate((4, 40, 40)):
        asked = request(number, prompt=prompt, output=14, tenant=f"batch{number}")
        driver.submit(replace(asked, priority=-1000))
    for _ in range(4):
        driver.answer()
    assert len(driver.core.view.decoding) == 3
    driver.submit(request(9, prompt=60, output=1, tenant="batch0"))
    while 9 in driver.core.live_requests:
        driver.answer()
    assert driver.core.num_preemptions == 2
    assert {0, 1, 2} <= set(driver.core.live_requests)
    driver.drain()


def test_nothing_is_preempted_for_memory_that_live_requests_hold() -> None:
    """Neither for the next in the queue nor for one that its tenant's own batch keeps waiting."""
    driver = Driver(config(max_running_per_tenant=2, num_blocks=24))
    driver.submit(request(0, prompt=40, output=20, tenant="live"))
    for number in (1, 2):
        asked = request(number, prompt=4, output=30, tenant="batch")
        driver.submit(replace(asked, priority=-1000))
    for _ in range(4):
        driver.answer()
    assert len(driver.core.view.decoding) == 3
    driver.submit(request(8, prompt=60, output=1, tenant="batch"))
    driver.submit(request(9, prompt=60, output=1, tenant="live"))
    for _ in range(10):
        driver.answer()
    assert 0 in driver.core.live_requests
    assert driver.core.num_preemptions == 0
    driver.drain()


def test_one_that_shares_a_prompt_takes_the_little_it_lacks_from_the_background() -> None:
    driver = Driver(config(num_blocks=14))
    driver.submit(replace(request(0, prompt=8, output=30), priority=-1000))
    driver.answer()
    for number in (1, 2):
        driver.submit(request(number, tokens=(5,) * 41, output=4, group="g"))
    while driver.callers[2].first is None:
        driver.answer()
    assert driver.core.num_preemptions == 1
    assert 1 in driver.core.live_requests
    driver.drain()


@pytest.mark.parametrize("order", ["fcfs", "priority", "shortest", "deadline", "fair", "mlfq"])
def test_no_queue_of_the_background_delays_a_live_request(order: str) -> None:
    """Each step has its next one, and many are older than what a live one may wait for its first
    token: by deadlines it is late itself once it waits."""
    driver = Driver(config(order=order, max_requests=2, ttft_s=0.005, num_blocks=400))
    for number in range(20):
        asked = request(number, prompt=8, output=50, tenant="batch", arrival_s=0.0)
        driver.submit(replace(asked, priority=-1000))
    for _ in range(8):
        driver.answer()
    driver.submit(request(100, prompt=40, output=30, arrival_s=driver.now_s, tenant="batch"))
    for _ in range(8):
        driver.answer()
    assert driver.callers[100].first is not None
    driver.drain()


@pytest.mark.parametrize("chunks", ["fixed", "dynamic"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_prompts_that_fill_every_step_leave_a_token_to_a_background_decode(
    num_stages: int, chunks: str
) -> None:
    options = {"chunks": chunks} | ({"high": 64, "low": 64} if chunks == "dynamic" else {})
    settings = {"num_blocks": 2000, "max_model_len": 400, "token_budget": 64}
    driver = Driver(config(**settings, num_stages=num_stages, policy_options=options))
    driver.submit(replace(request(0, prompt=8, output=300), priority=-1))
    for _ in range(6):
        driver.answer()
    before = len(driver.callers[0].tokens)
    for _ in range(100):
        while driver.core.view.num_waiting < 4:
            driver.submit(
                request(len(driver.callers), prompt=120, output=2, arrival_s=driver.now_s)
            )
        driver.answer()
    assert len(driver.callers[0].tokens) - before >= 100 // num_stages - 5
    driver.drain()
