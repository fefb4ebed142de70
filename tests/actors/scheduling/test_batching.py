"""What a step holds: the pipeline ahead of its tokens, chunks beside decodes, micro-batches."""

from __future__ import annotations

import pytest

from actors.scheduling.events import (
    StepDone,
)
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


@pytest.mark.parametrize("length", [1, 17, 60])
@pytest.mark.parametrize("budget", [4, 5, 16])
def test_no_prompt_stalls_a_decode(length: int, budget: int) -> None:
    driver = Driver(config(token_budget=budget))
    for number in range(4):
        driver.submit(request(number, prompt=3, output=30))
    while len(driver.core.requests.decoding) < 4:
        driver.answer()
    driver.submit(request(9, prompt=length, output=4))
    before = len(driver.plans)
    for _ in range(10):
        driver.answer()
    for plan in driver.plans[before:]:
        assert {0, 1, 2, 3} <= {part.request_id for part in plan.parts}
        # decodes alone may exceed the budget, a chunk never does
        assert plan.num_tokens <= max(budget, sum(p.num_tokens == 1 for p in plan.parts))
    if budget <= 4:  # no room for a chunk beside four decodes, and none is forced
        assert all(part.request_id != 9 for plan in driver.plans[before:] for part in plan.parts)
    driver.drain()


def test_dynamic_chunks_fall_as_a_prompt_progresses() -> None:
    options = {"chunks": "dynamic", "high": 64, "low": 32, "stages": 2, "span": 256}
    driver = Driver(
        config(
            num_blocks=200,
            max_model_len=512,
            max_step_tokens=128,
            policy_options=options,
            token_budget=1,
        )
    )
    driver.submit(request(1, prompt=300, output=1))
    driver.drain()
    assert [plan.num_tokens for plan in driver.plans] == [64, 64] + [32] * 5 + [12]


def test_chunks_are_cut_to_tiles() -> None:
    driver = Driver(config(token_budget=15, tile=4))
    driver.submit(request(1, prompt=2, output=20))
    driver.answer()
    driver.submit(request(2, prompt=30, output=2))
    driver.drain()
    assert [plan.num_tokens for plan in driver.plans[2:5]] == [12, 12, 9]  # 1 + 11, 1 + 11, 1 + 8


def test_long_prompts_share_a_step_with_short_ones() -> None:
    driver = Driver(config(token_budget=16, max_chunk=6))
    driver.submit(request(0, prompt=1, output=2))  # keeps the step busy while others arrive
    driver.submit(request(1, prompt=60, output=2))
    driver.submit(request(2, prompt=6, output=2))
    driver.submit(request(3, prompt=3, output=2))
    driver.answer()
    # the cap gives all three a share; what is left goes back to the first
    assert [(s[0], s[2]) for s in slices(driver, 1)] == [(0, 1), (1, 6), (2, 6), (3, 3)]
    driver.answer()
    assert [(s[0], s[2]) for s in slices(driver, 2)] == [(2, 1), (3, 1), (1, 14)]
    driver.drain()


def test_uniform_micro_batches_share_decodes_and_prompts() -> None:
    """Eight requests over two stages: the largest step tells how long the other stage waits."""

    def largest_steps(micro_batches: str) -> list[int]:
        driver = Driver(
            config(
                num_blocks=200,
                num_stages=2,
                micro_batches=micro_batches,
                token_budget=64,
                max_requests=8,
            )
        )
        driver.submit(request(0, prompt=4, output=40))
        for number in range(1, 8):
            driver.submit(request(number, prompt=4, output=40))
        for _ in range(40):
            driver.answer()
        sizes = [plan.num_tokens for plan in driver.plans[-10:]]
        driver.drain()
        return sorted(sizes)

    assert largest_steps("uniform") == [4] * 10
    assert largest_steps("greedy") == [1] * 5 + [7] * 5


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
