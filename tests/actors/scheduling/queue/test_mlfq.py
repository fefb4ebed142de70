"""Feedback levels: short prompts join at the top, long waits return there."""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.queue import build_order
from actors.scheduling.queue.mlfq import FeedbackLevels
from actors.scheduling.state import RequestStatus
from tests.actors.scheduling.queue.waiting_states import CONFIG, pop_all, state


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


def test_what_is_set_aside_is_promoted_but_waits_in_one_place() -> None:
    """At its tenant's cap, or while its KV is fetched."""
    order = build_order("mlfq", CONFIG)
    aside, other = state(1, prompt=400), state(2, prompt=400)
    order.push(aside, 0.0)
    assert order.peek(0.0) is aside
    assert order.pop() is aside
    order.push(other, 30.0)
    assert order.peek(31.0) is other  # 1 has waited so long that it is at the top level, once back
    order.restore(aside, 32.0)
    assert pop_all(order, 32.0) == [1, 2]


def test_those_that_have_left_are_not_kept() -> None:
    order = build_order("mlfq", CONFIG)
    assert isinstance(order, FeedbackLevels)
    for number in range(500):
        left = state(number, prompt=400)
        order.push(left, 20.0 * number)
        order.peek(20.0 * number + 15.0)  # promoted
        left.status = RequestStatus.ENDED
        assert order.peek(20.0 * number + 16.0) is None
    assert not order._entry_of


def test_an_old_entry_does_not_count_again() -> None:
    """Promoted while it waits, demoted while it runs, and preempted, it has the key it had."""
    config = SchedulerConfig(num_blocks=9, order_options={"quantum_tokens": 4, "promote_s": 1.0})
    order = build_order("mlfq", config)
    assert isinstance(order, FeedbackLevels)
    patient, first = state(1, prompt=8), state(2, prompt=4)
    order.push(patient, 0.0)
    assert order.peek(2.0) is patient
    assert order.pop() is patient
    patient.status = RequestStatus.RUNNING
    order.push(first, 2.0)  # before the entry that was left behind
    patient.served = 99
    assert order.rerank([patient], 2.0)
    patient.status = RequestStatus.WAITING
    order.restore(patient, 2.0)
    assert order.peek(2.0) is first
    order.pop()
    assert order.peek(2.0) is patient
    order.set_aside()  # its KV is fetched
    assert order.peek(2.0) is None


def test_those_that_have_started_are_not_kept_for_a_promotion() -> None:
    order = build_order("mlfq", SchedulerConfig(num_blocks=9, order_options={"promote_s": 1e6}))
    assert isinstance(order, FeedbackLevels)
    for number in range(2000):
        order.push(state(number, prompt=3), float(number))
        order.peek(float(number))
        order.pop().status = RequestStatus.RUNNING
    assert len(order._promotions) < 100
