"""Which request is next, in every order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.events import Reconfigure
from actors.scheduling.queue import ORDERS, build_order
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.state import RequestState, RequestStatus
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.queue.waiting_states import CONFIG, pop_all, state


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
