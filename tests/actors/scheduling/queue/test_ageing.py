"""Priority and length decide, and so does waiting."""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.queue import build_order
from actors.scheduling.queue.ageing import ShortestOutput
from tests.actors.scheduling.queue.waiting_states import CONFIG, pop_all, state


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


def test_the_expected_length_is_a_running_mean_and_never_more_than_was_asked_for() -> None:
    options = {"predict": True, "ageing_tokens_per_s": 0.0, "memory": 0.75}
    order = build_order("shortest", SchedulerConfig(num_blocks=9, order_options=options))
    for length in (4, 20):
        done = state(0, output=50, tenant="known")
        done.output_token_ids = [1] * length
        order.finish(done)
    for number, output in ((1, 7), (3, 9)):
        order.push(state(number, output=output, tenant="other"), 0.0)
    order.push(state(2, output=50, tenant="known"), 0.0)  # 8 are expected
    order.push(state(4, output=6, tenant="known"), 0.0)
    assert pop_all(order) == [4, 1, 2, 3]


def test_lengths_of_many_tenants_are_not_all_remembered() -> None:
    order = build_order("shortest", SchedulerConfig(num_blocks=9, order_options={"predict": True}))
    assert isinstance(order, ShortestOutput)
    for number in range(5000):
        order.finish(state(0, tenant=f"name {number}"))
    assert "name 4999" in order.means
    assert len(order.means) < 5000
