"""Which sizes of step are worth their time: tile edges, up to where longer ones gain little."""

from __future__ import annotations

from actors.scheduling.cost.model import CostModel

DENT = 0.05  # differences of token rate that a profile cannot tell from noise: the longer step


class StepSizes:
    """efficiency: share of the best token rate that ends the wish for longer steps."""

    def __init__(self, profile: CostModel, max_step_tokens: int, efficiency: float) -> None:
        self._profile = profile
        self._most = max_step_tokens
        self._efficiency = efficiency
        self._cheapest: list[int] = []  # by tokens; computed when first asked

    def at_most(self, num_tokens: int) -> int:
        """The longest step up to num_tokens with (nearly) the least time per token.

        From the size on that reaches `efficiency` of the best rate of all, that size is returned:
        longer steps would only make decodes slower and micro-batches uneven.
        """
        if not self._cheapest:
            self._cheapest = self._compute()
        return self._cheapest[min(num_tokens, self._most)]

    def _compute(self) -> list[int]:
        profile, most = self._profile, self._most
        rates = [0.0] + [n / (profile.overhead_s + profile.linear_s(n)) for n in range(1, most + 1)]
        enough = self._efficiency * max(rates)
        sizes, chosen, best = [0], 0, 0.0
        for n in range(1, most + 1):
            best = max(best, rates[n])
            if rates[chosen] < enough and rates[n] >= (1.0 - DENT) * best:
                chosen = n
            sizes.append(chosen)
        return sizes
