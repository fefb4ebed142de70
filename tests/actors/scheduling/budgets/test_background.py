"""Prompts of a priority below 0 extend no step beyond their share of the objective."""

from __future__ import annotations

import pytest

from actors.scheduling.plan import StepPlan
from actors.scheduling.request import Objective, Request, SamplingParams
from tests.actors.scheduling.budgets.test_loads import TBT_S, Stages, busy
from tests.actors.scheduling.budgets.tiled_model import TILED

NO_OBJECTIVE = Objective(3600.0, 3600.0)


def submit(stages: Stages, number: int, priority: int) -> None:
    objective = NO_OBJECTIVE if priority < 0 else Objective()
    stages.submit(
        Request(
            number, (2,) * 2000, SamplingParams(1), stages.now_s,
            objective=objective, priority=priority,
        )
    )  # fmt: skip


def longest_s(stages: Stages, num_steps: int = 100) -> tuple[float, int]:
    """Of so many steps, and the prompt tokens that they hold."""
    stages.gaps_s.clear()
    before = stages.num_prefilled
    for _ in range(num_steps):
        stages.answer()
    return max(stages.gaps_s), stages.num_prefilled - before


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_steps_with_a_batchs_prompts_are_shorter(share: float) -> None:
    stages = busy(TILED, budget_options={"background": share})
    for number in range(20):
        submit(stages, 100 + number, priority=-1000)
    took_s, num_tokens = longest_s(stages)
    assert took_s <= 1.01 * share * TBT_S
    assert num_tokens > 1000


def test_beside_a_prompt_that_is_waited_for_they_get_no_more() -> None:
    """Its chunks are as large as ever; the step that ends it has no room left for others."""
    stages = busy(TILED)
    for number in range(5):
        submit(stages, 100 + number, priority=-1000)
    for _ in range(5):
        stages.answer()
    submit(stages, 200, priority=0)
    took_s, _ = longest_s(stages)
    assert 0.6 * TBT_S < took_s <= TBT_S


def test_where_decodes_alone_exceed_the_share_the_batch_goes_on() -> None:
    stages = busy(TILED, tbt_s=0.018)
    for number in range(20):
        submit(stages, 100 + number, priority=-1000)
    took_s, num_tokens = longest_s(stages)
    assert took_s <= 0.018
    assert num_tokens > 0


def test_without_streams_a_batch_has_the_whole_engine() -> None:
    def first(priority: int) -> StepPlan:
        stages = busy(TILED)
        while stages.core.view.decoding:
            stages.answer()
        submit(stages, 100, priority)
        return stages.waiting[0][1]

    assert first(-1000).num_tokens == first(0).num_tokens == 2000
