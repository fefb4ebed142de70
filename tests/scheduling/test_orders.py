"""Who is next, and how long anybody can be passed over."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.events import Reconfigure
from actors.scheduling.policies import POLICIES
from actors.scheduling.queue import ORDERS, build_order
from actors.scheduling.request import Objective, Request, SamplingParams
from actors.scheduling.state import RequestState, Status
from tests.scheduling.driver import Driver

CONFIG = SchedulerConfig(num_blocks=100, block_size=4, max_model_len=64, prefix_cache=False)


def state(number: int, prompt: int = 4, output: int = 4, **request: object) -> RequestState:
    request.setdefault("arrival_s", float(number))
    return RequestState(
        Request(number, tuple(range(prompt)), SamplingParams(output), **request),  # type: ignore[arg-type]
        number,
        64,
    )


def pop_all(order: object, now_s: float = 0.0) -> list[int]:
    out = []
    while (head := order.peek(now_s)) is not None:  # type: ignore[attr-defined]
        assert order.pop() is head  # type: ignore[attr-defined]
        head.status = Status.RUNNING
        out.append(head.request_id)
    return out


@pytest.mark.parametrize("name", sorted(ORDERS))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "pop", "abort", "back", "drain"]),
            st.integers(0, 100),
            st.sampled_from("abc"),
            st.integers(1, 40),
        ),
        max_size=60,
    )
)
def test_every_order_keeps_everybody(name: str, script: list[tuple[str, int, str, int]]) -> None:
    order = build_order(name, CONFIG)
    waiting: dict[int, RequestState] = {}
    running: list[RequestState] = []
    now_s = 0.0
    for number, (action, argument, tenant, length) in enumerate(script):
        now_s += 1.0
        if action == "push":
            new = state(number, length, length, tenant=tenant, priority=argument % 3)
            waiting[number] = new
            order.push(new, now_s)
        elif action == "pop":
            head = order.peek(now_s)
            assert (head is None) == (not waiting)
            if head is not None:
                assert order.pop() is head
                assert waiting.pop(head.request_id) is head
                head.status = Status.RUNNING
                order.admit(head)
                order.serve([head])
                running.append(head)
        elif action == "abort" and waiting:
            victim = waiting.pop(sorted(waiting)[argument % len(waiting)])
            victim.status = Status.ENDED
        elif action == "back" and running:
            back = running.pop(argument % len(running))
            back.status = Status.WAITING
            waiting[back.request_id] = back
            order.restore(back, now_s)
        elif action == "drain":
            drained = order.drain()
            assert sorted(s.request_id for s in drained) == sorted(waiting)
            assert order.peek(now_s) is None
            for back in drained:
                order.push(back, now_s)
    assert sorted(pop_all(order, now_s)) == sorted(waiting)


def test_first_come_first_served_goes_by_the_stamped_arrival() -> None:
    order = build_order("fcfs", CONFIG)
    for new in (state(1, arrival_s=5.0), state(2, arrival_s=1.0), state(3, arrival_s=5.0)):
        order.push(new, 9.0)
    assert pop_all(order) == [2, 1, 3]


def test_priority_yields_to_long_waiting() -> None:
    order = build_order("priority", CONFIG)  # a class is worth 10 s
    order.push(state(1, arrival_s=0.0, priority=0), 0.0)
    order.push(state(2, arrival_s=9.0, priority=1), 9.0)
    order.push(state(3, arrival_s=11.0, priority=1), 11.0)
    assert pop_all(order) == [2, 1, 3]


def test_shortest_first_learns_lengths() -> None:
    config = SchedulerConfig(
        num_blocks=9, order_options={"predict": True, "ageing_tokens_per_s": 0.0}
    )
    order = build_order("shortest", config)
    for _ in range(3):
        done = state(0, output=50, tenant="brief")
        done.output_token_ids = [1, 2]
        order.finish(done)
    order.push(state(1, output=20, tenant="other"), 0.0)
    order.push(state(2, output=50, tenant="brief"), 0.0)
    assert pop_all(order) == [2, 1]


def test_deadline_relegates_what_is_lost_but_not_for_ever() -> None:
    config = SchedulerConfig(num_blocks=9, order_options={"patience_s": 5.0})
    order = build_order("deadline", config)
    order.push(state(1, arrival_s=0.0, objective=Objective(ttft_s=1.0)), 0.0)
    order.push(state(2, arrival_s=0.0, objective=Objective(ttft_s=50.0)), 0.0)
    order.push(state(3, arrival_s=0.0, objective=Objective(ttft_s=30.0)), 0.0)
    head = order.peek(2.0)  # 1 is too late
    assert head is not None
    assert head.request_id == 3
    head = order.peek(8.0)  # but has been patient
    assert head is not None
    assert head.request_id == 1
    assert order.pop() is head
    assert pop_all(order, 8.0) == [3, 2]


def test_deadline_patience_is_not_lost_with_a_place() -> None:
    """Set aside at its tenant's cap and back: it goes first once its patience is over."""
    options = {"default_ttft_s": 10.0, "patience_s": 20.0}
    order = build_order("deadline", replace(CONFIG, order_options=options))
    late = state(1)
    order.push(late, 0.0)
    assert order.peek(12.0) is late  # relegated
    assert order.pop() is late
    order.restore(late, 13.0)
    order.push(state(40), 40.0)
    assert order.peek(41.0) is late


def test_deadline_leaves_room_for_the_prompt() -> None:
    config = SchedulerConfig(num_blocks=9, order_options={"prefill_tokens_per_s": 10.0})
    order = build_order("deadline", config)
    order.push(state(1, prompt=5, arrival_s=0.0, objective=Objective(ttft_s=9.0)), 0.0)
    order.push(state(2, prompt=50, arrival_s=0.0, objective=Objective(ttft_s=10.0)), 0.0)
    assert pop_all(order) == [2, 1]


def test_levels_skip_join_and_promote() -> None:
    config = SchedulerConfig(num_blocks=9, order_options={"quantum_tokens": 4, "promote_s": 10.0})
    order = build_order("mlfq", config)
    long, short = state(1, prompt=30), state(2, prompt=3)
    order.push(long, 0.0)
    order.push(short, 0.0)
    assert (long.level, short.level) == (3, 0)
    assert order.peek(1.0) is short
    for number in range(3, 30):
        order.push(state(number, prompt=3), 1.0)
    assert order.peek(11.0) is not long or long.level == 0
    assert long.level == 0  # waited 10 s
    assert pop_all(order, 11.0)[0] == 1  # oldest of the top level


def test_bad_options_are_named() -> None:
    with pytest.raises(ConfigError, match="order_options"):
        build_order("fcfs", SchedulerConfig(num_blocks=9, order_options={"nonsense": 1}))


# ---- starvation and fairness, through the core ---------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nobody_starves_under_a_flood(policy: str) -> None:
    """One long request among an endless stream of short, urgent ones still ends."""
    options = {"mlfq": {"promote_s": 2.0}, "deadline": {"default_ttft_s": 10.0}}
    config = SchedulerConfig(
        num_blocks=16,
        block_size=4,
        max_requests=4,
        max_model_len=64,
        max_step_tokens=64,
        token_budget=8,
        policy=policy,
        order_options=options.get(policy, {}),
    )
    driver = Driver(config)
    driver.submit(Request(0, tuple(range(40)), SamplingParams(20), 0.0, tenant="long"))
    for number in range(1, 1500):
        sampling = SamplingParams(3, seed=number)
        objective = Objective(ttft_s=5.0)
        driver.submit(
            Request(number, (1, 2, 3), sampling, driver.now_s, tenant="x", objective=objective)
        )
        while driver.core.requests.num_waiting > 3 and driver.outstanding:
            driver.answer()
        if driver.callers[0].finish is not None:
            break
    assert driver.callers[0].finish is not None, "starved"
    driver.drain()


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
        service.update(driver.core.requests.waiting.order.counters)  # type: ignore[attr-defined]
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
    counters = driver.core.requests.waiting.order.counters  # type: ignore[attr-defined]
    assert counters["a"] == 10 + 4 * 3
    assert counters["b"] - 10 >= (10 + 4 * 3) / 2


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
    counters = driver.core.requests.waiting.order.counters  # type: ignore[attr-defined]
    assert counters["back"] >= counters["busy"] - 2 * 5 - 2  # not from zero
    before = len(driver.plans)
    driver.drain()
    started = [entry.request_id for plan in driver.plans[before:] for entry in plan.started]
    starts = ["busy" if number < 8 else "back" for number in started]
    assert "back" in starts[:4]
    assert "busy" in starts[:4]  # `back` does not go through alone


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_switching_orders_loses_nobody(order: str) -> None:
    driver = Driver(SchedulerConfig(num_blocks=20, block_size=4, max_requests=2, max_model_len=64))
    for number in range(12):
        tenant = "ab"[number % 2]
        driver.submit(Request(number, (1, 2, 3), SamplingParams(4), float(number), tenant=tenant))
    driver.send(Reconfigure({"order": order}))
    driver.send(Reconfigure({"order": "auto"}))
    driver.send(Reconfigure({"order": order}))
    driver.drain()
    driver.check_everyone_finished()


def test_deadline_knows_from_the_cost_model_how_long_a_prompt_takes() -> None:
    """1 ms a token: of two prompts due together, the one of 800 tokens must start 0.7 s earlier."""
    cost = {"name": "linear", "tokens_s": [[1, 0.001], [1000, 1.0]]}
    for cost_model, first in ((None, 1), (cost, 2)):
        order = build_order("deadline", replace(CONFIG, cost_model=cost_model))
        order.push(state(1, prompt=100, arrival_s=0.0, objective=Objective(ttft_s=2.0)), 0.0)
        order.push(state(2, prompt=800, arrival_s=0.0, objective=Objective(ttft_s=2.5)), 0.0)
        assert pop_all(order)[0] == first
