"""The cost model at work: it keeps learning from the steps it predicted.

The profile was taken on a quiet machine; heat, neighbours and other prompts change step times by
regime (decodes alone, mixed, prefill alone, each by size). Per regime two numbers are kept: the
running ratio of measured to predicted time, and a quantile of what is left after that ratio. Both
are exponentially forgetting, cost a microsecond and need no random access to history.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from actors.scheduling.cost_model import CostModel
from actors.scheduling.interfaces import StepShape
from actors.scheduling.mix import Mix


@dataclass(slots=True)
class Regime:
    """What was learnt about one kind of step.

    log_ratio: mean of log(measured / profile), starting at 0.
    log_quantile: the wanted quantile of log(measured / (profile * ratio)).
    count: observations so far.
    """

    log_ratio: float
    log_quantile: float
    count: int = 0


class OnlineCostModel:
    """A profile plus what the engine has seen since. Implements `interfaces.CostModel`.

    quantile: share of steps that should take no longer than `quantile_factor` promises.
    memory: observations over which the past fades; 0 switches learning off.
    """

    def __init__(self, profile: CostModel, quantile: float = 0.99, memory: int = 200) -> None:
        if not 0.5 <= quantile < 1.0:
            raise ValueError(f"quantile must lie in [0.5, 1), got {quantile}")
        self.profile = profile
        self.quantile = quantile
        self.memory = memory
        self._regimes: dict[int, Regime] = {}
        self._start_quantile = math.log(
            profile.ratio_at(quantile) / max(profile.ratio_at(0.5), 1e-9)
        )

    # ---- interfaces.CostModel ---------------------------------------------------------

    def step_s(self, shape: StepShape) -> float:
        """Expected seconds of the slowest stage."""
        mix = Mix.of_shape(shape, self.profile.attention_window)
        return self.profile.stage_s(mix) * self.ratio(mix)

    def swap_s(self, num_blocks: int) -> float:
        """Seconds to move KV blocks one way; infinite where it was never measured."""
        per_block_s = self.profile.swap_block_s
        return math.inf if per_block_s is None else per_block_s * num_blocks

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """Learn from a finished step."""
        if not self.memory or duration_s <= 0.0:
            return
        mix = Mix.of_shape(shape, self.profile.attention_window)
        predicted_s = self.profile.stage_s(mix)
        if predicted_s <= 0.0:
            return
        regime = self._regime(mix)
        regime.count += 1
        rate = max(1.0 / regime.count, 1.0 / self.memory)
        residual = math.log(duration_s / predicted_s) - regime.log_ratio
        # One outlier (a page fault, a collection) must not move the mean by its full size.
        regime.log_ratio += rate * max(-0.5, min(0.5, residual))
        # Stochastic approximation of the quantile: rises by q when exceeded, falls by 1 - q
        # otherwise, so it rests where exactly the share 1 - q exceeds it.
        step = 0.2 * max(rate, 0.02)
        exceeded = residual > regime.log_quantile
        regime.log_quantile += step * (self.quantile if exceeded else self.quantile - 1.0)
        regime.log_quantile = max(0.0, regime.log_quantile)

    # ---- for budgets and admission ----------------------------------------------------

    def ratio(self, mix: Mix) -> float:
        """Learned measured / profile ratio of this kind of step."""
        regime = self._regimes.get(_key(mix))
        return 1.0 if regime is None else math.exp(regime.log_ratio)

    def bound_factor(self, mix: Mix) -> float:
        """Factor on the profile's prediction that `quantile` of such steps stay below."""
        regime = self._regimes.get(_key(mix))
        if regime is None:
            return math.exp(self._start_quantile)
        return math.exp(regime.log_ratio + regime.log_quantile)

    def _regime(self, mix: Mix) -> Regime:
        key = _key(mix)
        regime = self._regimes.get(key)
        if regime is None:
            regime = self._regimes[key] = Regime(0.0, self._start_quantile)
        return regime


def _key(mix: Mix) -> int:
    """Decodes alone, prefill alone or mixed, by powers of four of the token count."""
    kind = 0 if not mix.prefill_tokens else 1 if not mix.num_decodes else 2
    return kind * 16 + (mix.num_decodes + mix.prefill_tokens).bit_length() // 2
