"""Which request is next, in every order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.events import Reconfigure
from actors.scheduling.queue import ORDERS, build_order
from actors.scheduling.request import Objective, Request, SamplingParams
from actors.scheduling.state import RequestState, RequestStatus
from tests.actors.scheduling.driver import Driver

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
        head.status = RequestStatus.RUNNING
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
def test_every_order_keeps_all(name: str, script: list[tuple[str, int, str, int]]) -> None:
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
                head.status = RequestStatus.RUNNING
                order.admit(head)
                order.serve([head])
                running.append(head)
        elif action == "abort" and waiting:
            victim = waiting.pop(sorted(waiting)[argument % len(waiting)])
            victim.status = RequestStatus.ENDED
        elif action == "back" and running:
            back = running.pop(argument % len(running))
            back.status = RequestStatus.WAITING
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


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_switching_orders_loses_none(order: str) -> None:
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
