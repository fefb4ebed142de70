"""A request that waits too long is refused on time, unless it has started before."""

from __future__ import annotations

import pytest

from actors.scheduling.events import Reconfigure, Refuse, StepFailed, Tick, WakeAt
from actors.scheduling.request import FinishReason
from actors.scheduling.state import RequestStatus
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.short_lives import config, request


def refused(driver: Driver) -> list[int]:
    return [number for number, caller in driver.callers.items() if caller.refused is not None]


def test_a_request_that_waits_too_long_is_refused_on_time() -> None:
    driver = Driver(config(max_requests=1, queue_timeout_s=5.0))
    driver.submit(request(1, output=30))
    driver.submit(request(2))
    assert driver.wake_at_s is not None
    instructions = driver.send(Tick(), after_s=5.5)
    assert isinstance(instructions[0], Refuse)
    assert instructions[0].request_id == 2
    assert instructions[0].retry_after_s is not None
    assert instructions[0].has_waited
    driver.drain()
    assert driver.callers[1].finish is FinishReason.LENGTH
    assert not any(isinstance(i, WakeAt) for i in driver.send(Tick()))


def test_each_is_woken_for_at_its_own_time() -> None:
    driver = Driver(config(max_requests=1, queue_timeout_s=5.0))
    driver.submit(request(1, output=30))  # at 0.01 s
    for number, after_s in ((2, 0.99), (3, 1.0), (4, 1.0)):
        driver.now_s += after_s - 0.01
        driver.submit(request(number))
    driver.abort(3)
    wakes = []
    while driver.wake_at_s is not None:
        wakes.append(driver.wake_at_s)
        after_s, driver.wake_at_s = driver.wake_at_s - driver.now_s, None
        driver.send(Tick(), after_s)
    # The first one has started and the third has left: nothing is due for them.
    assert wakes == pytest.approx([6.0, 8.0])
    assert refused(driver) == [2, 4]
    driver.drain()
    driver.check_everyone_finished()


@pytest.mark.parametrize("how", ["preempted", "suspected"])
def test_a_request_that_has_started_once_is_never_refused(how: str) -> None:
    driver = Driver(config(num_blocks=6, max_model_len=24, watermark=0.0, queue_timeout_s=5.0))
    for number in (1, 2):
        driver.submit(request(number, prompt=8, output=10))
    if how == "suspected":
        driver.answer()
        step = driver.outstanding.popleft()
        driver.stages.fail(step, applied=True)
        driver.failures += 1
        driver.send(StepFailed(step.step_id, "kernel panic"))
    state = driver.core.requests.by_id[2]
    for _ in range(30):
        if state.num_preemptions or how == "suspected":
            break
        driver.answer()
    assert state.status is RequestStatus.WAITING
    driver.send(Tick(), after_s=100.0)
    assert refused(driver) == []
    driver.drain()
    driver.check_everyone_finished()


def test_a_shorter_timeout_applies_to_requests_that_wait_already() -> None:
    driver = Driver(config(max_requests=1, queue_timeout_s=50.0))
    driver.submit(request(1, output=30))
    driver.submit(request(2))
    driver.send(Reconfigure({"queue_timeout_s": 5.0}))
    assert driver.wake_at_s == pytest.approx(5.02)
    driver.send(Tick(), after_s=5.5)
    assert refused(driver) == [2]
    driver.send(Reconfigure({"queue_timeout_s": None}))
    driver.submit(request(3))
    driver.send(Tick(), after_s=500.0)
    assert refused(driver) == [2]
    driver.drain()
    driver.check_everyone_finished()


def test_a_timeout_applies_to_requests_that_waited_before_there_was_one() -> None:
    driver = Driver(config(max_requests=1))
    driver.submit(request(1, output=30))
    driver.submit(request(2))
    driver.send(Reconfigure({"queue_timeout_s": 5.0}))
    driver.send(Tick(), after_s=500.0)
    assert refused(driver) == [2]
    driver.drain()
    driver.check_everyone_finished()


def test_no_choice_of_a_request_is_refused_once_another_has_started() -> None:
    """Its client reads that one's stream already, which a refusal would end."""
    driver = Driver(config(max_requests=1, queue_timeout_s=5.0, token_budget=4))
    for number in range(3):
        driver.submit(request(number, tokens=(1,) * 20, group="n", arrival_s=0.0))
    for number in (8, 9):
        driver.submit(request(number, tokens=(1,) * 20, group="later", arrival_s=0.0))
    driver.answer()
    driver.send(Tick(), after_s=6.0)
    assert refused(driver) == [8, 9]
    driver.drain()
    driver.check_everyone_finished()


@pytest.mark.parametrize("timeout_s", [None, 3600.0])
def test_requests_that_have_ended_are_not_kept(timeout_s: float | None) -> None:
    """However long the one before them may wait."""
    limits = {"max_requests": 2, "max_running_per_tenant": 1}
    driver = Driver(config(queue_timeout_s=timeout_s, **limits))
    for number in (1, 2):
        driver.submit(request(number, output=60, tenant="capped"))
    for number in range(3, 303):
        driver.submit(request(number, output=1, tenant=f"{number}"))
        while driver.callers[number].finish is None:
            driver.answer()
        if driver.callers[1].finish is not None:
            break
    assert len(driver.core.timeout._arrivals) < 100


def test_a_request_of_another_engine_has_waited_since_it_arrived_there() -> None:
    driver = Driver(config(max_requests=1, queue_timeout_s=5.0))
    driver.now_s = 100.0
    driver.submit(request(1, output=30))
    driver.submit(request(2, arrival_s=100.0))
    driver.submit(request(3, arrival_s=98.0, is_replayed=True))
    driver.submit(request(4, arrival_s=80.0, is_replayed=True, has_started=True))
    assert driver.wake_at_s == pytest.approx(103.0)
    driver.send(Tick(), after_s=3.0)
    assert refused(driver) == [3]
    driver.send(Tick(), after_s=3.0)
    assert refused(driver) == [2, 3]
    driver.drain()
    driver.check_everyone_finished()


def test_a_request_that_comes_too_late_from_another_engine_starts_where_it_can() -> None:
    driver = Driver(config(max_requests=1, queue_timeout_s=5.0))
    driver.now_s = 100.0
    driver.submit(request(1, arrival_s=80.0, is_replayed=True))
    driver.submit(request(2, arrival_s=80.0, is_replayed=True))
    driver.send(Tick(), after_s=0.0)
    driver.answer()
    assert refused(driver) == []
    driver.answer()  # of the first step that it could have been in
    assert refused(driver) == [2]
    driver.drain()
    driver.check_everyone_finished()


@pytest.mark.parametrize("token_budget", [16, 200])
def test_all_that_come_too_late_start_where_places_are_free(token_budget: int) -> None:
    """However few of them have room in a step, as after a rebuild that has taken long."""
    limits = {"max_requests": 64, "max_step_tokens": 256, "num_blocks": 400}
    driver = Driver(config(queue_timeout_s=5.0, token_budget=token_budget, **limits))
    driver.now_s = 100.0
    for number in range(20):
        driver.submit(request(number, prompt=12, arrival_s=80.0, is_replayed=True))
    driver.drain()
    assert refused(driver) == []
    driver.check_everyone_finished()
    assert not driver.core.timeout._late


def test_one_that_comes_too_late_waits_once_more_at_most() -> None:
    """Where a place is free, but not for it."""
    driver = Driver(config(queue_timeout_s=5.0, max_running_per_tenant=1))
    driver.now_s = 100.0
    driver.submit(request(1, output=40, tenant="capped"))
    driver.submit(request(2, arrival_s=80.0, is_replayed=True, tenant="capped"))
    assert driver.wake_at_s == pytest.approx(105.02)
    for _ in range(5):
        driver.answer()
    assert refused(driver) == []
    driver.send(Tick(), after_s=5.0)
    assert refused(driver) == [2]
    driver.drain()
    driver.check_everyone_finished()
