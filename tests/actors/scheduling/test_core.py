"""The pipeline is kept ahead of its tokens, and what comes back is checked."""

from __future__ import annotations

import pytest

from actors.scheduling.events import StepDone
from actors.scheduling.plan import StepResult
from actors.scheduling.request import FinishReason
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.fake_stages import expected_output
from tests.actors.scheduling.short_lives import config, request, slices


def test_lookahead_plans_the_next_step_before_the_token_is_known() -> None:
    driver = Driver(config(lookahead=True))
    driver.submit(request(1, prompt=3, output=3))
    assert [slices(driver, s) for s in range(len(driver.plans))] == [
        [(1, 0, 3, True)],
        [(1, 3, 1, True)],
    ]
    driver.drain()
    # never past max_tokens: the third token comes from position 4, and nothing behind it
    assert [slices(driver, s) for s in range(len(driver.plans))][2:] == [[(1, 4, 1, True)]]


def test_what_was_planned_beyond_a_stop_token_is_thrown_away() -> None:
    wanted = request(1, prompt=5, output=30)
    tokens, _ = expected_output(wanted, 64)
    stop = tokens[2]
    wanted = request(1, prompt=5, output=30, sampling={"stop_token_ids": (stop,)})
    driver = Driver(config(lookahead=True))
    driver.submit(wanted)
    driver.drain()
    caller = driver.callers[1]
    assert caller.finish is FinishReason.STOP
    assert caller.tokens == tokens[: tokens.index(stop) + 1]
    assert len(driver.plans) == len(caller.tokens) + 1  # one step too many, answered unheard
    assert driver.core.requests.running.block_manager.num_free == 40


def test_several_stages_hold_a_request_once_and_are_fed_its_tokens() -> None:
    driver = Driver(config(num_stages=3))
    for number in (1, 2, 3):
        driver.submit(request(number, prompt=3, output=3))
    assert len(driver.outstanding) == 3  # one micro-batch each
    driver.answer()
    plan = driver.plans[3]
    assert plan.fed == ((1, 3, driver.callers[1].tokens[0]),)
    driver.drain()
    driver.check_everyone_finished()


def test_min_tokens_and_the_context_limit() -> None:
    driver = Driver(config(max_model_len=10))
    everything = tuple(range(11))
    driver.submit(
        request(1, prompt=4, output=50, sampling={"stop_token_ids": everything, "min_tokens": 3})
    )
    driver.submit(request(2, prompt=4, output=50))
    driver.drain()
    assert len(driver.callers[1].tokens) == 4  # the stop token itself is delivered
    assert driver.callers[1].finish is FinishReason.STOP
    assert len(driver.callers[2].tokens) == 6
    assert driver.callers[2].finish is FinishReason.LENGTH


def test_an_answer_out_of_order_is_an_error() -> None:
    driver = Driver(config(num_stages=2))
    driver.submit(request(1))
    driver.submit(request(2))
    with pytest.raises(ValueError, match="oldest outstanding is 0"):
        driver.core.handle(StepDone(StepResult(1, ((2, 0),))), 1.0)
    with pytest.raises(ValueError, match="0 tokens for 1 sampling"):
        driver.core.handle(StepDone(StepResult(0, ())), 1.0)


def test_chunks_of_a_prompt_may_follow_each_other_through_the_stages() -> None:
    driver = Driver(config(num_stages=3, overlap_chunks=True, token_budget=8))
    driver.submit(request(1, prompt=20, output=3))
    assert [slices(driver, step) for step in range(3)] == [
        [(1, 0, 8, False)],
        [(1, 8, 8, False)],
        [(1, 16, 4, True)],
    ]
    driver.drain()
    driver.check_everyone_finished()
