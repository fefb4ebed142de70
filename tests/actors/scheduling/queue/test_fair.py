"""Fair shares of tenants, through the core."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import Reconfigure
from actors.scheduling.queue.fair import VirtualTokenCounter
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.state import RequestState, RequestStatus
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.queue.waiting_states import CONFIG, state


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 24), st.integers(1, 12)),
        min_size=20,
        max_size=60,
    ),
    st.sampled_from([1.0, 2.0, 5.0]),
)
def test_backlogged_tenants_are_served_within_the_bound(
    load: list[tuple[str, int, int]], weight_of_b: float
) -> None:
    """Sheng et al., theorem 4.4, with weighted service: |W_a - W_b| <= 2 U over any interval in
    which both wait; U = max(heaviest prompt, most output service resident at once).
    """
    config = SchedulerConfig(
        num_blocks=200,
        block_size=4,
        max_requests=3,
        max_model_len=64,
        token_budget=16,
        policy="fair",
        order_options={"weights": {"b": weight_of_b}},
    )
    driver = Driver(config)
    for number, (tenant, prompt, output) in enumerate(load):
        request = Request(number, tuple(range(prompt)), SamplingParams(output), 0.0, tenant=tenant)
        driver.submit(request)
    heaviest_prompt, most_output = 24, 3 * 12 * 2.0
    bound = 2 * max(heaviest_prompt, most_output)
    service: dict[str, float] = defaultdict(float)
    differences: list[float] = []  # while both wait without a break
    while driver.outstanding:
        service.update(driver.core.requests.waiting.order.live.counters)  # type: ignore[attr-defined]
        waiting = driver.core.requests.waiting.waiting_of
        if waiting.get("a", 0) and waiting.get("b", 0):
            differences.append(service["a"] - service["b"])
        else:
            differences.clear()
        if differences:
            assert max(differences) - min(differences) <= bound
        driver.answer()


def test_counters_count_what_was_served() -> None:
    config = SchedulerConfig(
        num_blocks=200,
        block_size=4,
        max_model_len=64,
        policy="fair",
        order_options={"weights": {"b": 2.0}, "prompt_weight": 1.0, "output_weight": 3.0},
    )
    driver = Driver(config)
    driver.submit(Request(1, (1,) * 10, SamplingParams(4), 0.0, tenant="a"))
    driver.submit(Request(2, (1,) * 10, SamplingParams(4), 0.0, tenant="b"))
    driver.drain()
    # b, arriving while a is alone and served at once, owes nothing and is lifted to nothing
    counters = driver.core.requests.waiting.order.live.counters  # type: ignore[attr-defined]
    assert counters["a"] == 10 + 4 * 3
    assert counters["b"] - 10 >= (10 + 4 * 3) / 2


def test_a_tenant_whose_counter_was_forgotten_goes_before_none_for_long() -> None:
    """Its request runs while thousands of names come by; others have been served much before."""
    order = VirtualTokenCounter(CONFIG)
    number = itertools.count()

    def push(tenant: str) -> RequestState:
        pushed = state(next(number), tenant=tenant)
        order.push(pushed, 0.0)
        return pushed

    def start() -> RequestState:
        head = order.peek(0.0)
        assert head is not None
        assert order.pop() is head
        head.status = RequestStatus.RUNNING
        order.admit(head)
        return head

    running = push("long")
    assert start() is running
    push("old")
    order.serve([start()] * 50_000)
    push("old")
    start()
    waiting = push("old")
    for index in range(4200):
        push(f"name {index}")
    assert "long" not in order.counters
    order.serve([running] * 10)
    running.status = RequestStatus.WAITING
    order.restore(running, 0.0)
    push("new")
    assert min(order.counters.values()) >= order.counters["old"] - 100
    assert waiting.status is RequestStatus.WAITING


def test_a_returning_tenant_has_saved_no_credit() -> None:
    config = SchedulerConfig(
        num_blocks=200, block_size=4, max_requests=1, max_model_len=64, policy="fair"
    )
    driver = Driver(config)
    for number in range(8):
        driver.submit(Request(number, (1, 2), SamplingParams(5), 0.0, tenant="busy"))
    for _ in range(20):
        driver.answer()
    for number in range(8, 16):
        driver.submit(Request(number, (1, 2), SamplingParams(5), 0.0, tenant="back"))
    counters = driver.core.requests.waiting.order.live.counters  # type: ignore[attr-defined]
    assert counters["back"] >= counters["busy"] - 2 * 5 - 2  # not from zero
    before = len(driver.plans)
    driver.drain()
    started = [entry.request_id for plan in driver.plans[before:] for entry in plan.started]
    starts = ["busy" if number < 8 else "back" for number in started]
    assert "back" in starts[:4]
    assert "busy" in starts[:4]  # `back` does not go through alone


def test_a_tenant_at_its_cap_keeps_its_credit() -> None:
    """Its waiting requests are set aside, but it is not idle: each of the three gets its share."""
    heavy, light, output = 300, 5, 10
    config = SchedulerConfig(
        num_blocks=4000,
        block_size=1,
        max_requests=2,
        max_model_len=900,
        token_budget=512,
        prefix_cache=False,
        drafter="none",
        policy="fair",
        max_running_per_tenant=1,
    )
    driver, number = Driver(config), itertools.count()
    tenant_of: dict[int, str] = {}

    def keep_waiting() -> None:
        for tenant, prompt in (("a", heavy), ("b", light), ("c", light)):
            while driver.core.view.num_waiting_of(tenant) < 3:
                tenant_of[one := next(number)] = tenant
                sampling = SamplingParams(output, min_tokens=output)
                asked = Request(one, (1,) * prompt, sampling, driver.now_s, tenant=tenant)
                driver.submit(asked)

    keep_waiting()
    for _ in range(300):
        driver.answer()
        keep_waiting()
    served = dict.fromkeys("abc", 0.0)
    for plan in driver.plans:
        for start in plan.started:
            served[tenant_of[start.request_id]] += start.num_prompt_tokens + 2 * output
    bound = 2 * max(heavy, 2 * 2 * output)
    assert max(served.values()) - min(served.values()) <= bound


def test_a_tenant_that_waits_for_a_fetch_is_not_idle() -> None:
    order = VirtualTokenCounter(CONFIG)
    for number, tenant in enumerate(("light", "heavy", "heavy")):
        order.push(state(number, tenant=tenant), 0.0)
    order.counters.update(light=10.0, heavy=100.0)
    assert order.peek(0.0) is not None
    order.set_aside()
    order.push(state(3, tenant="new"), 0.0)
    order.push(state(4, tenant="light"), 0.0)
    assert order.counters == {"light": 10.0, "heavy": 100.0, "new": 100.0}


@pytest.mark.parametrize("comes_back", ["restored", "pushed"])
def test_a_cap_gives_no_credit_without_end(comes_back: str) -> None:
    """Nobody is held back for all that a tenant at its cap has not asked for at once."""
    order = VirtualTokenCounter(CONFIG, {"capped": 4.0}, output_weight=1.0)
    for number, tenant in enumerate(("capped", "heavy")):
        order.push(state(number, tenant=tenant), 0.0)
    order.counters.update(capped=10.0, heavy=1e6)
    assert order.peek(0.0) is not None
    capped = order.set_aside()
    order.use(replace(CONFIG, max_running_per_tenant=3))
    if comes_back == "restored":
        order.restore(capped, 0.0)
    else:
        order.push(state(2, tenant="capped"), 0.0)
    assert order.counters["capped"] == 1e6 - 2 * CONFIG.max_model_len * 3 / 4


def test_none_is_raised_to_the_counter_of_a_tenant_at_its_cap() -> None:
    """Nor while none waits in the order: the tenant has not left."""
    order = VirtualTokenCounter(CONFIG)
    for number, tenant in enumerate(("capped", "heavy")):
        order.push(state(number, tenant=tenant), 0.0)
    order.counters.update(capped=10.0, heavy=100.0)
    assert order.peek(0.0) is not None
    order.set_aside()
    assert order.peek(0.0) is not None
    order.pop()
    order.push(state(2, tenant="capped"), 0.0)
    assert order.peek(0.0) is not None
    order.set_aside()
    order.push(state(3, tenant="new"), 0.0)
    assert order.counters == {"heavy": 100.0, "capped": 10.0, "new": 100.0}


def test_newcomers_beside_a_tenant_at_its_cap_do_not_hold_others_back() -> None:
    """A batch client at its cap has fallen far behind one that had the engine almost alone."""
    config = SchedulerConfig(
        num_blocks=2000,
        block_size=4,
        max_requests=3,
        max_model_len=4096,
        token_budget=64,
        prefix_cache=False,
        drafter="none",
        policy="fair",
        max_running_per_tenant=1,
    )
    driver, number = Driver(config), itertools.count()
    tenant_of: dict[int, str] = {}

    def keep_waiting(tenant: str, prompt: int, output: int) -> None:
        while driver.core.view.num_waiting_of(tenant) < 2:
            tenant_of[one := next(number)] = tenant
            sampling = SamplingParams(output, min_tokens=output)
            driver.submit(Request(one, (1,) * prompt, sampling, driver.now_s, tenant=tenant))

    for step in range(900):
        keep_waiting("batch", 4, 40)
        keep_waiting("busy", 40, 4)
        if step == 600:
            before = len(driver.plans)
        if step >= 600:
            for user in range(3):
                keep_waiting(f"user{user}", 40, 4)
        driver.answer()
    starts = [start.request_id for plan in driver.plans[before:] for start in plan.started]
    served = Counter(tenant_of[one] for one in starts)
    assert served["busy"] > served["user0"] / 2, served


def test_a_cap_that_is_lifted_leaves_no_credit_without_end() -> None:
    config = SchedulerConfig(
        num_blocks=400,
        block_size=4,
        max_requests=2,
        max_model_len=64,
        prefix_cache=False,
        policy="fair",
        max_running_per_tenant=1,
    )
    driver = Driver(config)
    for number, tenant in enumerate(("capped", "capped", "heavy", "other")):
        driver.submit(Request(number, (1, 2), SamplingParams(30), 0.0, tenant=tenant))
    driver.answer()
    counters = driver.core.requests.waiting.order.live.counters  # type: ignore[attr-defined]
    counters["other"] = 1e6
    driver.answer()
    assert driver.core.requests.waiting.parked
    driver.send(Reconfigure({"max_running_per_tenant": None}))
    assert counters["capped"] == 1e6 - 2 * 64 * 2
    driver.drain()
