"""Requests that break steps or kill the stages are found, few others pay, and nothing is lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from actors.scheduling.events import PipelineLost
from actors.scheduling.faults import Faults
from actors.scheduling.request import FinishReason
from actors.scheduling.state import RequestState
from actors.scheduling.step import StepBuilder
from tests.actors.scheduling.bench import Bench
from tests.actors.scheduling.driver import REBUILT_AFTER, Driver
from tests.actors.scheduling.short_lives import config, request

ROOM: dict[str, Any] = {"num_blocks": 4000, "max_model_len": 512, "max_requests": 256}
ROOM |= {"max_step_tokens": 512, "token_budget": 64}


def begin(num_requests: int, output: int = 20, **changes: Any) -> Driver:
    """All requests have been started."""
    driver = Driver(config(**(ROOM | changes)))
    for number in range(num_requests):
        driver.submit(request(number, output=output))
    return driver


@pytest.mark.parametrize("pipeline", [{}, {"lookahead": True}, {"num_stages": 4}], ids=str)
@pytest.mark.parametrize(("num_requests", "culprit"), [(1, 0), (2, 1), (12, 0), (12, 11)])
@pytest.mark.parametrize("after", [0, 9])
def test_a_killer_costs_three_losses_whatever_the_others_do(
    pipeline: dict[str, Any], num_requests: int, culprit: int, after: int
) -> None:
    driver = begin(num_requests, output=60, **pipeline)
    driver.killers[culprit] = lambda part: part.start >= after  # the driver allows three
    newest = num_requests
    while driver.callers[culprit].finish is None:
        driver.answer()
        newest += 1
        driver.submit(request(newest, output=2))
    driver.drain()
    driver.check_everyone_finished(but_errors=[culprit])


def test_a_killer_that_was_in_a_failed_step_before_costs_three_losses_too() -> None:
    """It is tried in one group at a time, also where its loss is that of another group's step."""
    driver = begin(8, output=30, lookahead=True)
    for _ in range(6):
        driver.answer()
    driver.fail(applied=True)
    driver.killers[7] = lambda part: True  # the driver allows three losses
    while driver.outstanding:
        driver.answer()
        tried = [state.request_id for group in driver.core.trials for state in group]
        assert len(tried) == len(set(tried))
    assert driver.num_kills == {7: 3}
    driver.check_everyone_finished(but_errors=[7])


def test_a_step_is_planned_once_where_neither_a_trial_nor_another_can_start() -> None:
    """A move holds the memory; a policy that preempts must not do so twice."""
    bench = Bench()
    bench.requests.running.block_manager.allocate(bench.requests.num_free_blocks)
    suspect = RequestState(request(1, num_losses=1), 1, max_model_len=64)
    faults = Faults(bench.requests)
    faults.suspect_from_before(suspect)
    bench.requests.add(suspect)
    asked: list[StepBuilder] = []
    for number in range(1, 5):
        assert not faults.plan_turn(bench.begin(), asked.append)
        assert len(asked) == number


@pytest.mark.parametrize("num_requests", [1, 5])
def test_a_killing_late_chunk_is_found(num_requests: int) -> None:
    driver = begin(num_requests)
    driver.submit(request(99, prompt=200))
    driver.killers[99] = lambda part: part.start + part.num_tokens > 100
    driver.drain()
    driver.check_everyone_finished(but_errors=[99])
    assert driver.callers[99].finish is FinishReason.ERROR


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("pooling", [None, "mean"])
@pytest.mark.parametrize("num_others", [0, 4])
def test_a_late_chunk_that_raises_is_found(
    num_stages: int, pooling: str | None, num_others: int
) -> None:
    driver = begin(num_others, num_stages=num_stages, lookahead=True)
    driver.submit(request(99, prompt=200, pooling=pooling))
    driver.poison[99] = lambda part: part.start + part.num_tokens > 150
    driver.drain()
    assert driver.callers[99].finish is FinishReason.ERROR
    assert driver.failures <= 8  # alone, it takes five that no other's success explains
    driver.check_everyone_finished(but_errors=[99])


def test_the_echo_of_a_failed_step_is_not_held_against_any_request() -> None:
    driver = begin(1, output=40, lookahead=True)
    for _ in range(4):
        driver.answer()
        assert len(driver.outstanding) == 2
        driver.fail(applied=False)
        driver.fail(applied=False)  # it was fed by the step before
        while len(driver.outstanding) < 2:
            driver.answer()
    driver.drain()
    driver.check_everyone_finished()


def test_one_culprit_among_many_takes_a_few_steps_to_find() -> None:
    driver = begin(256, output=30)
    for _ in range(20):
        driver.answer()
    driver.poison[77] = lambda part: True
    before = len(driver.plans)
    while driver.callers[77].finish is None:
        driver.answer()
    assert driver.failures <= 11  # log2 of 256, and twice alone
    assert len(driver.plans) - before < 80  # trials by turns with the steps of the cleared
    driver.drain()
    driver.check_everyone_finished(but_errors=[77])


def test_broken_stages_are_no_request_s_fault() -> None:
    """Four failures in a row make the engine rebuild its stages (`recovery.Recovery`)."""
    for num_requests in (1, 2, 30):
        driver = begin(num_requests)
        driver.answer()
        for _ in range(4):
            driver.fail(applied=True)
        assert all(caller.finish is None for caller in driver.callers.values())
        driver.lose()
        driver.drain()
        driver.check_everyone_finished()


def test_each_culprit_of_an_idle_engine_costs_one_rebuild() -> None:
    """The failures of one that has ended do not excuse the next one's first."""
    driver, num_culprits = begin(0), 3
    for culprit in range(num_culprits):
        driver.poison[culprit] = lambda part: True
        driver.submit(request(culprit))
        driver.drain()
        assert driver.core.num_failures_in_a_row == 0
    driver.check_everyone_finished(but_errors=list(range(num_culprits)))
    # four, then a rebuild, and the one more that ends it
    assert driver.failures == num_culprits * (REBUILT_AFTER + 1 + 1)


@pytest.mark.parametrize("num_requests", [2, 3, 6, 30])
@pytest.mark.parametrize("after", [0, 3, 9])
@pytest.mark.parametrize("num_stray", range(4))
def test_a_request_that_breaks_the_stages_for_good_takes_none_with_it(
    num_requests: int, after: int, num_stray: int
) -> None:
    """All steps fail from one of its own on, until the engine rebuilds its stages; there are
    suspects of other failures then."""
    driver = begin(num_requests, output=30)
    driver.submit(request(99, prompt=40, output=30))
    stages_work, num_rebuilds = True, 0
    while driver.outstanding:
        parts = driver.outstanding[0].named_slices
        if any(part.request_id == 99 and part.start >= after for part in parts):
            stages_work = False
        if stages_work and num_stray and driver.core.num_failures_in_a_row == 0:
            num_stray -= 1
            driver.fail(applied=True)
        elif stages_work:
            driver.answer()
        else:
            driver.fail(applied=True)
            if driver.core.num_failures_in_a_row == REBUILT_AFTER:
                driver.lose(steps_are_suspect=False)
                stages_work = True
                num_rebuilds += 1
    assert driver.callers[99].finish is FinishReason.ERROR
    assert num_rebuilds <= 2 + num_requests.bit_length()  # halved, and twice alone
    driver.check_everyone_finished(but_errors=[99])


@pytest.mark.heavy
def test_deaths_that_strike_at_random_blame_no_request() -> None:
    driver = begin(40, output=200)
    for turn in range(12):
        driver.lose()
        for _ in range(turn):
            driver.answer()
        while driver.core.requests.trials:
            driver.answer()
    driver.drain()
    driver.check_everyone_finished()


def test_suspicion_outlives_the_scheduler() -> None:
    driver = Driver(config(**ROOM))
    for number in range(40):
        driver.submit(request(number, num_losses=2 if number == 20 else 1))
    driver.killers[20] = lambda part: True
    driver.drain()
    assert driver.num_kills[20] <= 2  # beside others of one loss never, alone once
    assert driver.callers[20].finish is FinishReason.ERROR
    driver.check_everyone_finished(but_errors=[20])


def test_an_abort_ends_a_trial() -> None:
    driver = begin(3)
    driver.killers[1] = lambda part: True
    driver.lose()
    while driver.core.requests.trials:
        driver.answer()
        driver.abort(1)
    driver.drain()
    driver.send(PipelineLost())
    driver.check_everyone_finished()


def test_what_was_planned_for_stages_that_were_gone_is_no_suspect() -> None:
    """And it has waited until it is planned again."""
    driver = begin(0)
    driver.submit(request(1, arrival_s=0.0))
    driver.outstanding.clear()
    driver.now_s = 5.0
    driver.send(PipelineLost(driver.stages.lose(), first_dropped=0))
    assert not driver.core.trials
    driver.drain()
    first = driver.callers[1].first
    assert first is not None
    assert first.queued_s > 5.0


def test_streams_of_a_lost_engine_are_recomputed_within_the_budget() -> None:
    """Short ones go on before long ones are through, and running ones wait for no long step."""
    driver = begin(8, output=60, token_budget=128)
    for _ in range(4):
        driver.answer()
    for number, length in enumerate((10, 20, 400, 450), start=100):
        driver.submit(request(number, prompt=length, output=20, num_losses=1))
    begun, moved = len(driver.plans), (100, 101, 102, 103)
    first_at = dict[int, int]()
    while len(first_at) < len(moved):
        driver.answer()
        for number in moved:
            if driver.callers[number].tokens:
                first_at.setdefault(number, len(driver.plans))
    assert max(plan.num_tokens for plan in driver.plans[begun:]) <= 128
    assert first_at[100] == first_at[101] < first_at[102] <= first_at[103]
    turns = [{part.request_id for part in plan.named_slices} & {0} for plan in driver.plans[begun:]]
    assert all(any(pair) for pair in pairwise(turns))  # 0 was here: at least every second step
    driver.drain()
    driver.check_everyone_finished()
