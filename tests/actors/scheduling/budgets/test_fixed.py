"""Which budget a config gets; the profiled one is the largest that fits the objective."""

from __future__ import annotations

import dataclasses

import pytest

from actors.scheduling.budgets import build_budget
from actors.scheduling.budgets.adaptive import AdaptiveBudget
from actors.scheduling.budgets.fixed import FixedBudget, largest_budget
from actors.scheduling.build import build_core
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.plan import StepShape
from tests.actors.scheduling.budgets.tiled_model import TILED
from tests.actors.scheduling.modeled import modeled


def test_the_profiled_budget_is_the_largest_that_fits() -> None:
    budget = largest_budget(TILED, 0.05, num_decodes=8, context_tokens=500)

    def step_s(tokens: int) -> float:
        mix = Mix(8, 8 * 500)
        mix.add(500, tokens - 8)
        return TILED.stage_s(mix)

    assert step_s(budget) <= 0.05 < step_s(budget + 1)


def test_pipelines_and_error_shrink_it() -> None:
    plain = largest_budget(TILED, 0.1)
    data = TILED.to_dict()
    erring = CostModel.from_dict({**data, "ratio_quantiles": ((0.5, 1.0), (0.99, 1.3))})
    staged = CostModel.from_dict({**data, "num_stages": 2, "transfer_s": ((1, 0.004),)})
    assert largest_budget(erring, 0.1) < plain
    assert largest_budget(staged, 0.1) < plain
    assert staged.stage_share_s(0.1, 256) == pytest.approx((0.1 - 0.004) / 2)
    # Even where decodes alone miss the objective a budget must let decodes run.
    assert largest_budget(TILED, 0.001, num_decodes=8) == 8


def test_bad_settings_are_named() -> None:
    plain = SchedulerConfig(num_blocks=64, tbt_s=0.1)
    data = TILED.to_dict()
    for changes, message in (
        ({"budget": "psychic"}, "budget: unknown"),
        ({"budget": "adaptive"}, "needs a cost model"),
        ({"budget": "profiled", "cost_model": data, "tbt_s": None}, "needs an objective"),
        ({"budget": "adaptive", "cost_model": data, "budget_options": {"x": 1}}, "x"),
    ):
        config = SchedulerConfig(
            **{  # type: ignore[arg-type]
                "num_blocks": plain.num_blocks,
                "tbt_s": plain.tbt_s,
                **changes,
            }
        )
        with pytest.raises(ConfigError, match=message):
            build_core(config)


def test_profiled_is_built_from_the_config() -> None:
    config = modeled(TILED, budget="profiled", tbt_s=0.05, max_requests=16)
    built = build_budget(config, OnlineCostModel(TILED))
    assert isinstance(built, FixedBudget)
    assert 16 < built.tokens < 600
    assert built.observe(StepShape(1, 1), 1.0, 0.0) is None


def test_auto_adapts_unless_its_tokens_are_given() -> None:
    config = modeled(TILED, budget="auto", tbt_s=0.05)
    cost = OnlineCostModel(TILED)
    assert isinstance(build_budget(config, cost), AdaptiveBudget)
    assert build_budget(config, None) == FixedBudget(512)
    assert build_budget(dataclasses.replace(config, token_budget=64), cost) == FixedBudget(64)
    with pytest.raises(ConfigError, match="has no effect"):
        dataclasses.replace(config, budget="adaptive", token_budget=64).check()
