"""A core from its configuration: the live scheduler actor and the simulator call the same."""

from __future__ import annotations

from actors.scheduling.admission import build_admission
from actors.scheduling.budgets import build_budget
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.core import Core
from actors.scheduling.cost.objective import by_rule
from actors.scheduling.cost.online import read_cost_model
from actors.scheduling.interfaces import Admission, StepTimePredictor, TokenBudget
from actors.scheduling.policies import build_policy
from actors.scheduling.queue import build_order


def check_config(config: SchedulerConfig) -> None:
    """Raise ConfigError naming the first impossible value, unknown policy or order, or option.

    Used before anything is started: budgets and admission need the KV memory's size, so they are
    judged by `build_core`.
    """
    config.check()
    policy = build_policy(config)
    build_order(policy.order if config.order == "auto" else config.order, config)


def build_core(
    config: SchedulerConfig,
    *,
    budget: TokenBudget | None = None,
    admission: Admission | None = None,
    cost_model: StepTimePredictor | None = None,
) -> Core:
    """A core as `config` describes it; parts given here win over the named ones.

    Raises ConfigError naming the setting that cannot be.
    """
    config.check()
    cost_model = cost_model or read_cost_model(config.cost_model)
    config = by_rule(config, cost_model)
    return Core(
        config,
        budget or build_budget(config, cost_model),
        admission or build_admission(config, cost_model),
        cost_model,
    )
