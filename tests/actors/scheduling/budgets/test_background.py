"""Beside live requests, background work hardly lengthens a step, and goes on."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from actors.scheduling.budgets.background import LENGTHENED
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.events import Abort
from actors.scheduling.plan import StepPlan
from actors.scheduling.request import Objective, Request, SamplingParams
from tests.actors.scheduling.budgets.test_adapter_loads import TBT_S, Stages, busy
from tests.actors.scheduling.budgets.tiled_model import TILED

AHEAD = {"lookahead": True, "drafter": "none"}  # drafts would wait for what they continue
NO_OBJECTIVE = Objective(3600.0, 3600.0)
SHORT = 200  # tokens of streams that are waited for


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


def idle(model: CostModel = TILED, **changes: object) -> Stages:
    stages = busy(model, output=SHORT, **changes)
    while stages.core.view.decoding:
        stages.answer()
    return stages


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


@pytest.mark.heavy
def test_decodes_of_a_batch_wait_while_there_are_too_many_and_all_go_on() -> None:
    stages = busy(TILED, output=SHORT, max_requests=128)
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
    mine = [p for p in plans if any(part.request_id == 200 for part in p.named_slices)]
    assert sum(
        part.num_tokens for p in mine for part in p.named_slices if part.request_id == 200
    ) >= (num_tokens)
    for plan in mine:
        of_batch = sum(
            part.num_tokens for part in plan.named_slices if 100 <= part.request_id < 200
        )
        assert of_batch <= 64  # to the tile's edge, which costs nothing


def test_a_prompt_that_is_waited_for_makes_steps_as_long_as_ever() -> None:
    stages = busy(TILED)
    for number in range(5):
        submit(stages, 100 + number, priority=-1000)
    for _ in range(5):
        stages.answer()
    submit(stages, 200, priority=0)
    assert 0.6 * TBT_S < longest_s(stages, 20) <= TBT_S


@pytest.mark.heavy
def test_without_live_requests_a_batch_has_short_steps_at_most_of_the_best_rate() -> None:
    def rate(plan: StepPlan) -> float:
        return plan.num_tokens / TILED.linear_s(plan.num_tokens)

    def first(number: int, priority: int) -> StepPlan:
        stages = idle()
        for one in range(100, 100 + number):
            submit(stages, one, priority, num_tokens=4000)
        return stages.waiting[0][1]

    live = first(1, 0)
    assert live.num_tokens == 4000
    for number in (1, 9):
        plan = first(number, -1000)
        assert plan.num_tokens < 0.1 * live.num_tokens
        assert rate(plan) > 0.75 * rate(live)


def test_a_live_request_waits_for_one_long_step_of_a_batch() -> None:
    stages = idle(**AHEAD)
    for number in range(3):
        submit(stages, 100 + number, priority=-1000, num_tokens=4000)
    for _ in range(9):
        stages.answer()
        assert len(stages.waiting) == 1
    submit(stages, 200, priority=0, num_tokens=16)
    stages.answer()
    assert stages.waiting[0][1].named_slices[0].request_id == 200


def test_short_steps_of_a_batch_are_planned_ahead() -> None:
    fast = CostModel("fast", ((1, 0.001), (2048, 0.5)), kv_tokens=64_000, max_model_len=4096)
    stages = idle(fast, **AHEAD)
    submit(stages, 100, priority=-1000, num_tokens=4, output=20)
    for _ in range(9):
        stages.answer()
        assert len(stages.waiting) == 2


def test_streams_of_a_batch_alone_all_get_their_tokens() -> None:
    stages = idle()
    for number in range(20):
        submit(stages, 100 + number, priority=-1000, num_tokens=16, output=50)
    for _ in range(10):
        stages.answer()
    assert all(len(plan.named_slices) == 20 for plan in (stages.answer() for _ in range(10)))


@pytest.mark.heavy
@pytest.mark.parametrize("order", ["fcfs", "fair", "deadline"])
def test_a_batch_goes_on_as_ever_while_a_live_request_waits_behind_it(order: str) -> None:
    """It has waited longer than its priority says. The longer it took, the longer the live one
    waited."""
    stages = busy(TILED, output=SHORT, max_requests=16, order=order)
    while stages.core.view.decoding:
        stages.answer()
    for number in range(20):
        submit(stages, 100 + number, priority=-1, num_tokens=16, output=50)
    for _ in range(20):
        stages.answer()
    stages.now_s += 20.0
    submit(stages, 200, priority=0, num_tokens=50, output=400)
    assert all(len(stages.answer().named_slices) == 16 for _ in range(10))
    for _ in range(80):
        stages.answer()
    assert stages.core.live_requests[200].num_output_tokens > 0


@pytest.mark.parametrize("output", [1, 100])
def test_where_a_token_takes_more_than_a_tenth_it_comes_the_more_seldom(output: int) -> None:
    steep = ((1, 0.010), (2, 0.014), (64, 0.050))
    stages = busy(CostModel("m", steep, kv_tokens=60_000, max_model_len=4096), tbt_s=0.1)
    while len(stages.core.live_requests) > 1:
        number = max(stages.core.live_requests)
        stages.take(stages.core.handle(Abort(number), stages.now_s))
        stages.answer()
    alone_s = longest_s(stages, 20)
    submit(stages, 100, priority=-1000, num_tokens=101 - output, output=output)
    stages.gaps_s.clear()
    plans = [stages.answer() for _ in range(300)]
    assert 50 < sum(len(plan.named_slices) > 1 for plan in plans) < 100
    assert mean(stages.gaps_s) <= LENGTHENED * alone_s * 1.01
    for _ in range(200):
        stages.answer()
    assert list(stages.core.live_requests) == [0]


@pytest.mark.heavy
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("micro_batches", ["greedy", "uniform"])
def test_steps_between_two_of_a_live_decode_are_no_longer_than_these(
    num_stages: int, micro_batches: str
) -> None:
    model = replace(TILED, num_stages=num_stages)
    stages = busy(model, output=SHORT, max_requests=96, micro_batches=micro_batches, drafter="none")
    while stages.core.view.decoding:
        stages.answer()
    for number in range(60):
        submit(stages, 100 + number, priority=-1000, num_tokens=16, output=2000)
    for _ in range(60):
        stages.answer()
    submit(stages, 200, priority=0, num_tokens=50, output=2000)
    for _ in range(30):
        stages.answer()
    limit_s = LENGTHENED * model.stage_s(Mix(1, 400)) * 1.35  # what it has learned of few decodes
    between = []
    for _ in range(20 * num_stages):
        plan = stages.answer()
        if all(part.request_id != 200 for part in plan.named_slices):
            between.append(len(plan.named_slices))
            assert model.stage_s(Mix.of(plan.slices)) <= limit_s
    assert sum(between) >= 5 * len(between) > 0
