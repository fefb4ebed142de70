"""Token budgets that come from an objective: profiled once here, per iteration in `adaptive`.

The fixed budget is in `defaults`. The paper profiles step time against tokens and keeps the
largest budget whose P99 meets the TBT objective (section 4.3): `ProfiledBudget`. It must assume
the worst batch it will ever meet, so most steps end early; `adaptive` decides anew each step.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.scheduling.cost.model import CostModel
from actors.scheduling.interfaces import EngineView, StepShape
from actors.scheduling.cost.mix import Mix


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
    limit_s = stage_share_s(profile, tbt_s, max_tokens) / max(profile.ratio_at(quantile), 1e-9)
    mix = Mix(num_decodes, num_decodes * context_tokens)
    return num_decodes + profile.largest_chunk(
        mix, context_tokens, max_tokens - num_decodes, limit_s
    )


def stage_share_s(profile: CostModel, tbt_s: float, num_tokens: int) -> float:
    """What one stage may spend per step so that a token comes round within tbt_s."""
    n = profile.num_stages
    if n == 1:
        return tbt_s
    linear_s = profile.linear_s(num_tokens)
    while num_tokens > 1 and linear_s * n > tbt_s:  # the send is that of a step that fits
        num_tokens //= 2
        linear_s = profile.linear_s(num_tokens)
    return (tbt_s - (n - 1) * profile.send_s(num_tokens)) / n


@dataclass(frozen=True, slots=True)
class ProfiledBudget:
    """A constant derived from the objective and the profile at start."""

    tokens: int

    def num_tokens(self, shape: StepShape, engine: EngineView) -> int:
        return self.tokens

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """The profile was taken once."""
