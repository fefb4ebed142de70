"""Least slack first, and what is late already is not forgotten."""

from __future__ import annotations

from dataclasses import replace

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.queue import build_order
from actors.scheduling.request import Objective
from tests.actors.scheduling.queue.waiting_states import CONFIG, pop_all, state


def test_relegates_what_is_lost_but_not_for_ever() -> None:
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


def test_patience_is_not_lost_with_a_place() -> None:
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


def test_a_stream_that_was_preempted_goes_before_first_tokens_that_are_due_later() -> None:
    order = build_order("deadline", CONFIG)
    stream = state(1, arrival_s=0.0, objective=Objective(ttft_s=1000.0))
    stream.output_token_ids, stream.last_token_s = [7], 5.0
    order.push(state(2, arrival_s=4.0, objective=Objective(ttft_s=20.0)), 4.0)
    order.restore(stream, 6.0)
    assert pop_all(order, 6.0) == [1, 2]


def test_leaves_room_for_the_prompt() -> None:
    config = SchedulerConfig(num_blocks=9, order_options={"prefill_tokens_per_s": 10.0})
    order = build_order("deadline", config)
    order.push(state(1, prompt=5, arrival_s=0.0, objective=Objective(ttft_s=9.0)), 0.0)
    order.push(state(2, prompt=50, arrival_s=0.0, objective=Objective(ttft_s=10.0)), 0.0)
    assert pop_all(order) == [2, 1]


def test_knows_from_the_cost_model_how_long_a_prompt_takes() -> None:
    """1 ms a token: of two prompts due together, the one of 800 tokens must start 0.7 s earlier."""
    cost = {"name": "linear", "tokens_s": [[1, 0.001], [1000, 1.0]]}
    for cost_model, first in ((None, 1), (cost, 2)):
        order = build_order("deadline", replace(CONFIG, cost_model=cost_model))
        order.push(state(1, prompt=100, arrival_s=0.0, objective=Objective(ttft_s=2.0)), 0.0)
        order.push(state(2, prompt=800, arrival_s=0.0, objective=Objective(ttft_s=2.5)), 0.0)
        assert pop_all(order)[0] == first


def test_knows_that_a_window_shortens_a_prompt() -> None:
    """1 ms a token, or with all pairs of tokens 27 ms."""
    cost = {"name": "linear", "tokens_s": [[1, 0.001], [1000, 1.0]], "prefill_pair_s": 1e-4}
    for window, first in ((0, 2), (4, 1)):
        cost_model = {**cost, "attention_window": window}
        order = build_order("deadline", replace(CONFIG, cost_model=cost_model))
        order.push(state(1, prompt=100, arrival_s=0.0, objective=Objective(ttft_s=30.0)), 0.0)
        order.push(state(2, prompt=800, arrival_s=0.0, objective=Objective(ttft_s=35.0)), 0.0)
        assert pop_all(order)[0] == first
