"""Constant token budgets: given as a number, or derived once from an objective and a profile.

The paper profiles step time against tokens and takes the largest budget whose P99 meets the TBT
objective (section 4.3): `largest_budget`. It must assume the worst batch, so most steps end early;
`adaptive` decides anew for each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from actors.scheduling.budgets.adapter_loads import UNPROMISED_LOAD_S
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel, cost_model_for
from actors.scheduling.interfaces import EngineView
from actors.scheduling.plan import StepShape
from actors.scheduling.registry import options_of, within


def largest_budget(
    profile: CostModel,
    tbt_s: float,
    *,
    num_decodes: int = 32,
    context_tokens: int = 4096,
    quantile: float = 0.99,
    max_tokens: int = 8192,
) -> int:
    """The paper's choice: the most tokens a step may hold so that its P99 meets the objective.

    The step is num_decodes decodes at context_tokens each plus one chunk of a prompt that is
    already context_tokens long. With n stages a token takes n stages and n - 1 sends, so each
    stage gets that much less. Falls back to num_decodes when even decodes alone miss it.
    """
    limit_s = profile.stage_share_s(tbt_s, max_tokens) / max(profile.ratio_at(quantile), 1e-9)
    mix = Mix(num_decodes, num_decodes * context_tokens)
    return num_decodes + profile.largest_chunk(
        mix, context_tokens, max_tokens - num_decodes, limit_s
    )


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """A constant number of tokens."""

    learns: ClassVar[bool] = False
    holds_starts: ClassVar[bool] = False

    tokens: int

    @classmethod
    def build(
        cls, config: SchedulerConfig, cost: OnlineCostModel | None, tokens: int | None = None
    ) -> FixedBudget:
        within(1, config.max_step_tokens, tokens=tokens)
        return cls(config.constant_budget if tokens is None else tokens)

    def num_tokens(self, shape: StepShape, engine: EngineView) -> int:
        return self.tokens

    def may_start(self, engine: EngineView) -> bool:
        return True

    def num_background_decodes(self, live: StepShape, most: int, context: int) -> int:
        return max(1, min(most, self.tokens - live.num_tokens))

    def room_for_background(self, shape: StepShape) -> int:
        return self.tokens - shape.num_tokens

    def room_for_drafts(self, shape: StepShape) -> int:
        return self.tokens - shape.num_tokens

    def room_for_adapter_loads_s(self, shape: StepShape) -> float:
        return UNPROMISED_LOAD_S

    def observe(self, shape: StepShape, duration_s: float, drafting_s: float) -> None:
        """Does nothing: a constant does not learn."""

    def delivery_took(self, seconds: float) -> None:
        """Likewise."""


@options_of(largest_budget)
def profiled_budget(
    config: SchedulerConfig, cost: OnlineCostModel | None, **options: Any
) -> FixedBudget:
    """The constant that objective and profile allow (options: those of `largest_budget`)."""
    profile = cost_model_for("budget", "profiled", cost).profile
    if config.tbt_s is None:
        raise ConfigError("slo.tbt_ms", "a profiled budget needs an objective")
    # The worst case: every slot in use, the KV cache shared evenly.
    kv_tokens = config.num_blocks * config.block_size
    within(0, 1, quantile=options.get("quantile"))
    within(1, config.max_requests, num_decodes=options.get("num_decodes"))
    within(0, 1e9, context_tokens=options.get("context_tokens"))
    within(1, config.max_step_tokens, max_tokens=options.get("max_tokens"))
    options.setdefault("num_decodes", config.max_requests)
    options.setdefault("context_tokens", min(4096, kv_tokens // config.max_requests))
    options.setdefault("max_tokens", config.max_step_tokens)
    return FixedBudget(largest_budget(profile, config.tbt_s, **options))
