"""Token throttling: how much prefill a micro-batch gets."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from actors.scheduling.budgets.throttled import ThrottledBudget
from actors.scheduling.build import build_core
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.plan import StepShape
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.statistics import statistics
from tests.actors.scheduling.driver import Driver

HALF_READ = SimpleNamespace(num_tokens=900, num_computed_tokens=100)


@dataclass
class View:
    """The parts of `EngineView` that the budget reads."""

    num_waiting_tokens: int
    num_free_blocks: int
    prefilling: tuple[SimpleNamespace, ...] = ()
    decoding: tuple[SimpleNamespace, ...] = (SimpleNamespace(),)
    num_blocks: int = 100


@pytest.mark.parametrize(
    ("view", "prefill"),
    [
        (View(800, 100), 100),  # an eighth of what waits
        (View(801, 100), 101),
        (View(80_000, 100), 500),  # but no more than the step may hold
        (View(80_000, 24), 100),  # a fifth of what may be used is left: a fifth of it
        (View(80_000, 6), 32),  # a chunk worth a step, while anything is left
        (View(80_000, 5), 0),  # the rest belongs to the decodes
        (View(80_000, 5, decoding=()), 32),  # unless there are none
        (
            View(0, 100, (SimpleNamespace(num_tokens=900, num_computed_tokens=100),)),
            100,
        ),  # half-read prompts
        (View(0, 100), 32),
    ],
)
def test_prefill_follows_the_queue_and_the_memory(view: Any, prefill: int) -> None:
    budget = ThrottledBudget(500)
    assert budget.num_tokens(StepShape(), view) == prefill
    decodes = StepShape(40, 4000)
    assert budget.num_tokens(decodes, view) == min(40 + prefill, 500)


def test_a_prompt_is_spread_over_steps() -> None:
    config = SchedulerConfig(
        num_blocks=40, block_size=4, max_model_len=160, max_requests=4, token_budget=64,
        budget="throttled", budget_options={"iterations": 4, "least": 4},
        lookahead=False, allocation="chunk",
    )  # fmt: skip
    driver = Driver(config)
    driver.submit(Request(1, (1, 2), SamplingParams(80), 0.0))
    driver.answer()
    driver.submit(Request(2, tuple(range(80)), SamplingParams(4), 0.0))
    driver.answer()  # the step under way when it came
    sizes = []
    while driver.callers[1].finish is None:
        plan = driver.plans[-1]
        parts = {part.request_id: part.num_tokens for part in plan.named_slices}
        assert parts[1] == 1, "a decode waited"
        sizes.append(parts.get(2, 0))
        driver.answer()
    assert sizes[:3] == [20, 15, 12]  # a quarter of what is left, and of that again
    driver.drain()
    driver.check_everyone_finished()


def test_memory_is_left_for_decodes_to_grow_into() -> None:
    def preemptions(**changes: Any) -> float:
        config = SchedulerConfig(
            num_blocks=20, block_size=4, max_model_len=64, max_requests=8, token_budget=32,
            watermark=0.0, swap="never", **changes,
        )  # fmt: skip
        driver = Driver(config)
        for number in range(6):
            driver.submit(Request(number, tuple(range(10)), SamplingParams(24), float(number)))
        driver.drain()
        driver.check_everyone_finished()
        return statistics(driver.core)["num_preemptions"]

    options = {"threshold": 0.75, "least": 4}
    assert preemptions(budget="throttled", budget_options=options) < preemptions()


@pytest.mark.parametrize("options", [{"iterations": 0}, {"threshold": 1.0}, {"nonsense": 1}])
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    config = SchedulerConfig(num_blocks=8, budget="throttled", budget_options=options)
    with pytest.raises(ConfigError, match="budget_options"):
        build_core(config)
