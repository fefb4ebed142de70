"""Beside streams, a step whose prompts are a batch's (priority below 0) is a short one."""

from __future__ import annotations

from actors.scheduling.plan import StepPlan
from actors.scheduling.request import Objective, Request, SamplingParams
from tests.actors.scheduling.budgets.test_loads import TBT_S, Stages, busy
from tests.actors.scheduling.budgets.tiled_model import TILED

NO_OBJECTIVE = Objective(3600.0, 3600.0)


def submit(stages: Stages, number: int, priority: int, num_tokens: int = 2000) -> None:
    objective = NO_OBJECTIVE if priority < 0 else Objective()
    stages.submit(
        Request(
            number, (2,) * num_tokens, SamplingParams(1), stages.now_s,
            objective=objective, priority=priority,
        )
    )  # fmt: skip


def steps(priority: int, num_steps: int = 60) -> tuple[float, float]:
    """The longest of so many steps beside streams, and prompt tokens per second."""
    stages = busy(TILED)
    for number in range(40):
        submit(stages, 100 + number, priority)
    before, began_s = stages.num_prefilled, stages.now_s
    stages.gaps_s.clear()
    for _ in range(num_steps):
        stages.answer()
    num_tokens, took_s = stages.num_prefilled - before, stages.now_s - began_s
    return max(stages.gaps_s), num_tokens / took_s


def test_a_batchs_prompts_make_steps_far_shorter_at_half_the_rate_or_more() -> None:
    longest_s, rate = steps(priority=0)
    assert longest_s > 0.8 * TBT_S
    shorter_s, slower = steps(priority=-1000)
    assert shorter_s < 0.6 * longest_s
    assert 0.45 * rate < slower < rate


def test_a_prompt_that_is_waited_for_makes_steps_as_long_as_ever() -> None:
    stages = busy(TILED)
    for number in range(5):
        submit(stages, 100 + number, priority=-1000)
    for _ in range(5):
        stages.answer()
    submit(stages, 200, priority=0)
    stages.gaps_s.clear()
    for _ in range(20):
        stages.answer()
    assert 0.6 * TBT_S < max(stages.gaps_s) <= TBT_S


def test_a_short_prompt_that_is_waited_for_makes_no_room_for_the_batch() -> None:
    def longest_s(num_prompts: int) -> float:
        stages = busy(TILED)
        for number in range(40):
            submit(stages, 100 + number, priority=-1000)
        for _ in range(5):
            stages.answer()
        for number in range(num_prompts):
            submit(stages, 200 + number, priority=0, num_tokens=16)
        stages.gaps_s.clear()
        for _ in range(20):
            stages.answer()
        return max(stages.gaps_s)

    assert longest_s(1) < 1.5 * longest_s(0)  # a tile more


def test_without_streams_a_batch_has_the_whole_engine() -> None:
    def first(priority: int) -> StepPlan:
        stages = busy(TILED)
        while stages.core.view.decoding:
            stages.answer()
        submit(stages, 100, priority)
        return stages.waiting[0][1]

    assert first(-1000).num_tokens == first(0).num_tokens == 2000


def test_a_prompt_that_is_waited_for_comes_before_a_batchs_that_has_begun() -> None:
    stages = busy(TILED)
    submit(stages, 100, priority=-1000)
    for _ in range(3):
        stages.answer()
    assert stages.core.view.prefilling
    submit(stages, 200, priority=0, num_tokens=16)
    for _ in range(4):
        stages.answer()
    (batch,) = stages.core.view.prefilling
    assert batch.request.request_id == 100
    assert 200 not in stages.core.live_requests  # its one token has come
