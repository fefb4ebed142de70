"""Beside live requests, background work hardly lengthens a step, and goes on."""

from __future__ import annotations

import pytest

from actors.scheduling.budgets.background import LENGTHENED
from actors.scheduling.plan import StepPlan
from actors.scheduling.request import Objective, Request, SamplingParams
from tests.actors.scheduling.budgets.test_loads import TBT_S, Stages, busy
from tests.actors.scheduling.budgets.tiled_model import TILED

NO_OBJECTIVE = Objective(3600.0, 3600.0)


def submit(
    stages: Stages, number: int, priority: int, num_tokens: int = 2000, output: int = 1
) -> None:
    objective = NO_OBJECTIVE if priority < 0 else Objective()
    stages.submit(
        Request(
            number, (2,) * num_tokens, SamplingParams(output), stages.now_s,
            objective=objective, priority=priority,
        )
    )  # fmt: skip


def longest_s(stages: Stages, num_steps: int) -> float:
    stages.gaps_s.clear()
    for _ in range(num_steps):
        stages.answer()
    return max(stages.gaps_s)


def test_prompts_of_a_batch_lengthen_steps_beside_streams_by_a_part_at_most() -> None:
    stages = busy(TILED)
    alone_s = longest_s(stages, 20)
    for number in range(40):
        submit(stages, 100 + number, priority=-1000)
    stages.answer()
    before = stages.num_prefilled
    assert alone_s < longest_s(stages, 60) <= LENGTHENED * alone_s * 1.01
    assert stages.num_prefilled - before > 20 * 60
    for number in range(40):
        submit(stages, 200 + number, priority=0)
    assert longest_s(stages, 60) > 0.8 * TBT_S  # live prompts take all that the streams leave


def test_decodes_of_a_batch_wait_while_there_are_too_many_and_all_go_on() -> None:
    stages = busy(TILED, max_requests=128)
    alone_s = longest_s(stages, 20)
    names = range(100, 180)
    while stages.core.view.decoding:  # the streams end: the batch's prompts are computed meanwhile
        stages.answer()
    for number in names:
        submit(stages, number, priority=-1000, num_tokens=16, output=500)
    for _ in range(20):
        stages.answer()
    for number in range(16):
        submit(stages, number, priority=0, num_tokens=50, output=500)
    for _ in range(8):
        stages.answer()
    decoding = stages.core.view.decoding
    assert len(decoding) == len(names) + 16
    before = {v.request_id: v.num_output_tokens for v in decoding}
    stages.gaps_s.clear()
    for _ in range(40):
        stages.answer()
    assert max(stages.gaps_s) <= LENGTHENED * alone_s * 1.05
    after = {v.request_id: v.num_output_tokens for v in stages.core.view.decoding}
    assert {after[number] - before[number] for number in range(16)} == {40}
    gained = [after[number] - before[number] for number in names]
    assert 0 < max(gained) - 4 <= min(gained)
    assert max(gained) < 40


@pytest.mark.parametrize("num_tokens", [16, 1000])
def test_a_step_with_a_live_prompt_has_no_more_of_a_batch_than_keeps_it_going(
    num_tokens: int,
) -> None:
    stages = busy(TILED)
    for number in range(5):
        submit(stages, 100 + number, priority=-1000)
    for _ in range(3):
        stages.answer()
    submit(stages, 200, priority=0, num_tokens=num_tokens)
    plans = []
    while 200 in stages.core.live_requests:
        plans.append(stages.answer())
    mine = [p for p in plans if any(part.request_id == 200 for part in p.parts)]
    assert sum(part.num_tokens for p in mine for part in p.parts if part.request_id == 200) >= (
        num_tokens
    )
    for plan in mine:
        of_batch = sum(part.num_tokens for part in plan.parts if 100 <= part.request_id < 200)
        assert of_batch <= 64  # to the tile's edge, which costs nothing


def test_a_prompt_that_is_waited_for_makes_steps_as_long_as_ever() -> None:
    stages = busy(TILED)
    for number in range(5):
        submit(stages, 100 + number, priority=-1000)
    for _ in range(5):
        stages.answer()
    submit(stages, 200, priority=0)
    assert 0.6 * TBT_S < longest_s(stages, 20) <= TBT_S


def test_without_live_requests_a_batch_has_steps_of_an_efficient_length() -> None:
    def first(priority: int) -> StepPlan:
        stages = busy(TILED)
        while stages.core.view.decoding:
            stages.answer()
        submit(stages, 100, priority, num_tokens=4000)
        return stages.waiting[0][1]

    assert first(0).num_tokens == 4000
    assert 500 < first(-1000).num_tokens < 2000


def test_streams_of_a_batch_alone_all_get_their_tokens() -> None:
    stages = busy(TILED)
    while stages.core.view.decoding:
        stages.answer()
    for number in range(20):
        submit(stages, 100 + number, priority=-1000, num_tokens=16, output=50)
    for _ in range(10):
        stages.answer()
    assert all(len(plan.parts) == 20 for plan in (stages.answer() for _ in range(10)))
