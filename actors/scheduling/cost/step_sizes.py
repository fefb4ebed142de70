"""Which sizes of step are worth their time."""

from __future__ import annotations

from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel

DENT = 0.05  # differences of token rate that a profile cannot tell from noise: the longer step


class StepSizes:
    """Tile edges, up to where longer steps gain little.

    efficiency: share of the best token rate that ends the wish for longer steps.
    dent: what a rate may lack of the best one, for a longer step.
    """

    def __init__(
        self, profile: CostModel, max_step_tokens: int, efficiency: float, dent: float = DENT
    ) -> None:
        self._profile = profile
        self._most = max_step_tokens
        self._efficiency = efficiency
        self._dent = dent
        self._candidates: list[int] = []
        self._cheapest: list[int] = []  # by tokens; computed when first asked

    def at_most(self, num_tokens: int) -> int:
        """The longest step up to num_tokens with (nearly) the least time per token.

        From the size on that reaches `efficiency` of the best rate of all, that size is returned:
        longer steps would only make decodes slower and micro-batches uneven.
        """
        if not self._cheapest:
            self._cheapest = self._compute()
        return self._cheapest[min(num_tokens, self._most)]

    def beside(self, mix: Mix, share: float) -> int:
        """The shortest step with this share of the best prefill rate beside these decodes.

        The longer it is, the more prefill shares what the decodes cost."""
        profile, num_decodes = self._profile, mix.num_decodes
        fixed_s = profile.stage_s(mix) - profile.linear_s(mix.num_tokens)
        if not self._candidates:
            found, n = [], 16.0
            while n < self._most:
                found.append(self.at_most(int(n)))
                n *= 1.12
            self._candidates = sorted({*found, self.at_most(self._most)})
        rates = [(n - num_decodes) / (fixed_s + profile.linear_s(n)) for n in self._candidates]
        enough = share * max(rates)
        return next(n for n, rate in zip(self._candidates, rates, strict=True) if rate >= enough)

    def _compute(self) -> list[int]:
        profile, most = self._profile, self._most
        rates = [0.0] + [n / (profile.overhead_s + profile.linear_s(n)) for n in range(1, most + 1)]
        enough = self._efficiency * max(rates)
        sizes, chosen, best = [0], 0, 0.0
        for n in range(1, most + 1):
            best = max(best, rates[n])
            if rates[chosen] < enough and rates[n] >= (1.0 - self._dent) * best:
                chosen = n
            sizes.append(chosen)
        return sizes
