"""A core from its configuration: the live scheduler actor and the simulator call the same."""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.core import Core
from actors.scheduling.interfaces import Admission, CostModel, TokenBudget
from actors.scheduling.queue import build_order
from actors.scheduling.parts import build_admission, build_budget, build_cost_model
from actors.scheduling.policies import build_policy


def check_config(config: SchedulerConfig) -> None:
    """Raise ConfigError naming the first impossible value, unknown policy or order, or option.

    For the door, before anything else is there: budgets and admission need the KV memory's size,
    so they are judged by `build_core`.
    """
    config.check()
    policy = build_policy(config)
    build_order(policy.order if config.order == "auto" else config.order, config)


def build_core(
    config: SchedulerConfig,
    *,
    budget: TokenBudget | None = None,
    admission: Admission | None = None,
    cost_model: CostModel | None = None,
) -> Core:
    """A core as `config` describes it; parts given here win over the named ones.

    Raises ConfigError naming the setting that cannot be.
    """
    config.check()
    cost_model = cost_model or build_cost_model(config)
    return Core(
        config,
        budget or build_budget(config, cost_model),
        admission or build_admission(config, cost_model),
        cost_model,
    )
