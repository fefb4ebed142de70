"""How many tokens a step may hold.

A budget is a class with `build(config, cost_model, **options)`, and one row of `BUDGETS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actors.scheduling.budgets.adaptive import AdaptiveBudget
from actors.scheduling.budgets.fixed import FixedBudget, profiled_budget
from actors.scheduling.budgets.throttled import ThrottledBudget
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.interfaces import StepTimePredictor, TokenBudget
from actors.scheduling.registry import build_part, check_part, options_of

__all__ = ["BUDGETS", "build_budget", "check_budget"]


# A live step costs its delivery too, which no cost model of stages knows: longer ones pay.
AUTO_EFFICIENCY = 0.95
# A prompt of thousands of tokens takes a hundred steps, and its neighbors see the worst of them.
AUTO_ALLOWED_MISSES = 0.002
# An admission that promises an objective promises it of all of a request's gaps, dozens of them,
# and one long step is a gap of every stream. Shorter steps cost little where prompts always wait:
# as streams end sooner, fewer run at a time.
PROMISED = {"allowed_misses": 0.0005, "miss_cost": 0.06, "first_share": 0.75, "caution": 1.5}


@options_of(FixedBudget.build, AdaptiveBudget.build)
def _auto(config: SchedulerConfig, cost: StepTimePredictor | None, **options: Any) -> TokenBudget:
    """Adaptive with a cost model; fixed without one, and where its tokens are given."""
    is_fixed = config.token_budget is not None or options.get("tokens") is not None
    if isinstance(cost, OnlineCostModel) and not is_fixed:
        options.pop("tokens", None)
        defaults = {
            "efficiency": AUTO_EFFICIENCY,
            "allowed_misses": AUTO_ALLOWED_MISSES,
            "follow_learnt": True,
            **(PROMISED if config.admission == "predictive" else {}),
        }
        return AdaptiveBudget.build(config, cost, **{**defaults, **options})
    if others := sorted(options.keys() - {"tokens"}):
        why = "where the tokens are given" if is_fixed else "without a cost model"
        raise ConfigError("budget_options", f"{others[0]} has no effect {why}")
    return FixedBudget.build(config, None, **options)


BUDGETS: Mapping[str, Callable[..., TokenBudget]] = {
    "auto": _auto,
    "fixed": FixedBudget.build,
    "profiled": profiled_budget,
    "adaptive": AdaptiveBudget.build,
    "throttled": ThrottledBudget.build,
}


def build_budget(config: SchedulerConfig, cost_model: StepTimePredictor | None) -> TokenBudget:
    """The budget `config` names; raises ConfigError for what is unknown, missing or impossible."""
    return build_part("budget", config.budget, BUDGETS, config.budget_options, config, cost_model)


def check_budget(config: SchedulerConfig) -> None:
    """Raises ConfigError for what no cost model and no size of the KV memory would mend."""
    check_part("budget", config.budget, BUDGETS, config.budget_options)
    if config.budget == "profiled" and config.tbt_s is None and config.tbt_rule is None:
        raise ConfigError("slo.tbt_ms", "a profiled budget needs an objective")
