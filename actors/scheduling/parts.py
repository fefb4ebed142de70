"""The parts of a core that a configuration names: budget, admission and cost model.

Policies and orders are looked up in the rooms of their own. Everything raises ConfigError naming
the setting that is unknown, lacks something, or has an option the part does not know.
"""

from __future__ import annotations

from actors.scheduling import interfaces
from actors.scheduling.budgets.adaptive import AdaptiveBudget
from actors.scheduling.admission.predictive import PredictedPeak, Promises
from actors.scheduling.budgets.fixed import ProfiledBudget, largest_budget
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.scheduling.defaults import AcceptAll, FixedBudget
from actors.scheduling.interfaces import Admission, TokenBudget
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.budgets.throttled import ThrottledBudget

BUDGETS = ("fixed", "throttled", "profiled", "adaptive")
ADMISSIONS = ("all", "predicted_peak", "promises")


def build_cost_model(config: SchedulerConfig) -> OnlineCostModel | None:
    """The cost model that the configuration carries as data, ready to learn; None without one."""
    if config.cost_model is None:
        return None
    try:
        return OnlineCostModel(CostModel.from_dict(config.cost_model))
    except (ValueError, TypeError) as error:
        raise ConfigError("cost_model", str(error)) from error


def build_budget(config: SchedulerConfig, cost_model: interfaces.CostModel | None) -> TokenBudget:
    """The budget that the configuration names."""
    if config.budget not in BUDGETS:
        raise ConfigError("budget", f"unknown {config.budget!r}; known: {', '.join(BUDGETS)}")
    options = dict(config.budget_options)
    try:
        if config.budget == "fixed":
            return FixedBudget(**{"tokens": config.token_budget, **options})
        if config.budget == "throttled":
            return ThrottledBudget(**{"most": config.token_budget, **options})
        if not isinstance(cost_model, OnlineCostModel):
            message = f"{config.budget!r} needs a cost model: run `legato profile`"
            raise ConfigError("budget", message)
        if config.budget == "profiled":
            if config.tbt_s is None:
                raise ConfigError("slo.tbt_ms", "a profiled budget needs an objective")
            # The fullest engine there can be: every slot taken, the KV cache shared evenly.
            kv_tokens = config.num_blocks * config.block_size
            options.setdefault("num_decodes", config.max_requests)
            options.setdefault("context_tokens", min(4096, kv_tokens // config.max_requests))
            options.setdefault("max_tokens", config.max_step_tokens)
            return ProfiledBudget(largest_budget(cost_model.profile, config.tbt_s, **options))
        return AdaptiveBudget(
            cost_model,
            config.tbt_s,
            config.max_step_tokens,
            config.max_requests,
            overlap_chunks=config.overlap_chunks,
            **options,
        )
    except TypeError as error:
        raise ConfigError("budget_options", str(error)) from error


def build_admission(config: SchedulerConfig, cost_model: interfaces.CostModel | None) -> Admission:
    """The admission that the configuration names."""
    if config.admission not in ADMISSIONS:
        message = f"unknown {config.admission!r}; known: {', '.join(ADMISSIONS)}"
        raise ConfigError("admission", message)
    options = dict(config.admission_options)
    try:
        if config.admission == "all":
            return AcceptAll(**options)
        if config.admission == "predicted_peak":
            return PredictedPeak(**options)
        if not isinstance(cost_model, OnlineCostModel):
            raise ConfigError("admission", "'promises' needs a cost model: run `legato profile`")
        if options.get("action", "refuse") not in ("refuse", "queue"):
            raise ConfigError("admission_options", "action is 'refuse' or 'queue'")
        peak = PredictedPeak(
            **{k: options.pop(k) for k in ("expected_share", "reserve") if k in options}
        )
        return Promises(
            cost_model,
            config.tbt_s,
            config.ttft_s,
            config.max_step_tokens,
            config.max_requests,
            peak=peak,
            **options,
        )
    except TypeError as error:
        raise ConfigError("admission_options", str(error)) from error
