"""Builds a core from its configuration, for the live scheduler actor and the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actors.scheduling.admission import build_admission, check_admission
from actors.scheduling.budgets import build_budget, check_budget
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.core import Core
from actors.scheduling.cost.online import read_cost_model
from actors.scheduling.interfaces import Admission, StepTimePredictor, TokenBudget
from actors.scheduling.plan import StepShape
from actors.scheduling.policies import build_policy
from actors.scheduling.queue import build_order

# The paper's objectives: multiples of the time of a decode step without prefill
DECODE_STEPS: Mapping[str, float] = {"strict": 5.0, "relaxed": 25.0}
STREAMS, CONTEXT = 32, 4096  # of that decode step, within the engine's limits
_STANDS_IN: Mapping[str, Any] = {"name": "none", "tokens_s": [[1, 0.01], [1000, 0.1]]}


def check_config(config: SchedulerConfig, *, is_measured: bool = True) -> None:
    """Raise ConfigError naming the first impossible value, unknown part, or option.

    is_measured: a cost model will be, where none is given. Called before anything starts: budget
    and admission are built with one that stands in for it, so that their options are refused now.
    What they make of the real one and of the size of the KV memory is checked by `build_core`.
    """
    config.check()
    policy = build_policy(config)
    build_order(policy.order if config.order == "auto" else config.order, config)
    check_budget(config)
    check_admission(config)
    stands_in = _STANDS_IN if is_measured else None
    cost = read_cost_model(config.cost_model or stands_in)
    config = _by_rule(config, cost)
    build_budget(config, cost)
    build_admission(config, cost)


def build_core(
    config: SchedulerConfig,
    *,
    budget: TokenBudget | None = None,
    admission: Admission | None = None,
    cost_model: StepTimePredictor | None = None,
) -> Core:
    """The core that `config` describes; parts passed here replace the configured ones.

    Raises ConfigError naming an invalid setting.
    """
    config.check()
    cost_model = cost_model or read_cost_model(config.cost_model)
    config = _by_rule(config, cost_model)
    return Core(
        config,
        budget or build_budget(config, cost_model),
        admission or build_admission(config, cost_model),
        cost_model,
    )


def _by_rule(config: SchedulerConfig, cost: StepTimePredictor | None) -> SchedulerConfig:
    """`config` with an objective in seconds in place of `tbt_rule`.

    Raises ConfigError where there is no cost model to say how long a decode step takes.
    """
    if config.tbt_rule is None:
        return config
    if cost is None:
        raise ConfigError("tbt_rule", "needs a cost model, and nothing could be measured")
    streams = min(STREAMS, config.max_requests)
    room = config.num_blocks * config.block_size // streams
    context = max(1, min(CONTEXT, config.max_model_len, room))
    step_s = cost.latency_s(StepShape(streams, streams * context))
    return replace(config, tbt_rule=None, tbt_s=DECODE_STEPS[config.tbt_rule] * step_s)
