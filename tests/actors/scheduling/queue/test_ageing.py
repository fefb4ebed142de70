"""Priority and length decide, and so does waiting."""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.queue import build_order
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
