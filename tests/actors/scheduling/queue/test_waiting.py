"""The waiting queue: order, tenants at their cap set aside, suspects apart, counts that agree."""

from __future__ import annotations

from weakref import ReferenceType, ref

import pytest

from actors.scheduling.queue import ORDERS, build_order
from actors.scheduling.queue.waiting import HeapOrder, WaitingQueue
from actors.scheduling.state import RequestState, RequestStatus, Suspicion
from tests.actors.scheduling.short_lives import config, request


def _queue(**settings: object) -> WaitingQueue:
    settled = config(**settings)
    return WaitingQueue(settled, build_order("fcfs", settled))


class _State(RequestState):
    """Without slots, so that weak references can tell whether it is kept."""


def _state(number: int, tenant: str = "", priority: int = 0) -> RequestState:
    made = request(number, prompt=5, tenant=tenant, priority=priority)
    return _State(made, number, max_model_len=64)


def _start(queue: WaitingQueue, state: RequestState) -> None:
    queue.started(state)
    queue.pop(state)
    state.status = RequestStatus.RUNNING


def test_first_come_first_served_and_counted() -> None:
    queue = _queue()
    first, second = _state(1), _state(2)
    for state in (first, second):
        queue.add(state, 0.0)
    assert (queue.num_requests, queue.num_tokens) == (2, 10)
    assert queue.head(0.0) is first
    _start(queue, first)
    assert (queue.num_requests, queue.num_tokens) == (1, 5)
    assert queue.head(0.0) is second
    assert first.admitted


def test_a_preempted_request_comes_back_before_its_peers() -> None:
    queue = _queue()
    first, second = _state(1), _state(2)
    queue.add(first, 0.0)
    queue.head(0.0)
    _start(queue, first)
    queue.add(second, 0.0)
    queue.stopped(first, 1.0)
    first.status = RequestStatus.WAITING
    queue.restore(first, 1.0)
    assert queue.head(1.0) is first


def test_a_tenant_at_its_cap_steps_aside_until_a_slot_is_free() -> None:
    queue = _queue(max_running_per_tenant=1)
    greedy, again, other = _state(1, "a"), _state(2, "a"), _state(3, "b")
    for state in (greedy, again, other):
        queue.add(state, 0.0)
    assert queue.head(0.0) is greedy
    _start(queue, greedy)
    assert queue.head(0.0) is other
    assert list(queue.parked) == ["a"]
    _start(queue, other)
    assert queue.head(0.0) is None
    queue.stopped(greedy, 1.0)
    assert queue.head(1.0) is again
    assert not queue.parked


def test_a_suspect_waits_apart() -> None:
    queue = _queue()
    suspect = _state(1)
    suspect.suspicion = Suspicion()
    queue.restore(suspect, 0.0)
    assert queue.num_requests == 1
    assert queue.head(0.0) is None
    _start(queue, suspect)
    assert queue.num_requests == 0


def test_another_order_keeps_all_that_wait() -> None:
    queue = _queue(max_running_per_tenant=1)
    states = [_state(number, "a") for number in (1, 2, 3)]
    for state in states:
        queue.add(state, 0.0)
    queue.head(0.0)
    _start(queue, states[0])
    assert queue.head(0.0) is None  # two are parked
    settings = config()
    queue.config = settings
    queue.switch_order(build_order("shortest", settings), states, 1.0)
    assert not queue.parked
    assert queue.head(1.0) in states[1:]
    assert queue.num_requests == 2


@pytest.mark.parametrize("cap", [None, 1])
@pytest.mark.parametrize("name", ORDERS)
def test_those_that_left_are_not_kept_while_others_come_before_them(
    name: str, cap: int | None
) -> None:
    """A load that never lets the queue become empty: behind a background request that waits, none
    of them comes to the front, where orders skip who waits no longer."""
    settings = config(max_running_per_tenant=cap)
    queue = WaitingQueue(settings, build_order(name, settings))
    patient = _state(0, priority=-1000)
    queue.add(patient, 0.0)
    gone, before = list[ReferenceType[RequestState]](), _state(1)
    queue.add(before, 0.0)
    for number in range(2, 1000):
        now_s = 0.1 * number
        if before.status is RequestStatus.WAITING:
            assert queue.head(now_s) is before
            _start(queue, before)
        assert cap is None or queue.head(now_s) is None  # all that wait are set aside
        live, late = _state(2 * number), _state(2 * number + 1, priority=-1000)
        for state in (live, late):
            queue.add(state, now_s)
        assert (queue.head(now_s) is None) is bool(cap)
        queue.remove(late)  # its client has gone
        late.status = RequestStatus.ENDED
        gone.append(ref(late))
        queue.stopped(before, now_s)
        before.status = RequestStatus.ENDED
        before = live
    del state, late
    assert sum(state() is not None for state in gone) < 100
    queue.remove(before)
    before.status = RequestStatus.ENDED
    queue.unpark("", now_s)
    assert queue.head(now_s) is patient


def test_a_burst_that_left_is_not_kept() -> None:
    queue = _queue()
    order = queue.order
    assert isinstance(order, HeapOrder)
    states = [_state(number) for number in range(5000)]
    for state in states:
        queue.add(state, 0.0)
    for state in states[1:]:
        queue.remove(state)
        state.status = RequestStatus.ENDED
    assert len(order._heap) < 100
    assert queue.head(0.0) is states[0]
