"""At which numbers of tokens steps best end; the pace of prefill."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.interfaces import EngineView

APART = 1.12  # sizes to choose from
DENT = 0.05  # token rates this close are equal within a profile's noise: prefer the longer step
# While requests wait, every 16th step may be 4 times as long, so that such sizes are learned too.
EXPLORE_EVERY, EXPLORE_FACTOR = 16, 4
# Of an engine whose streams leave, in tokens and as `efficiency`.
LEAST_HAND_OVER, HAND_OVER_EFFICIENCY = 512, 0.95
# As `efficiency`, of steps of the background alone, for which a live request that comes waits.
BACKGROUND_EFFICIENCY = 0.8
LOOK_EVERY, OUTDATED = 256, 1.1  # steps; change of a ratio from which sizes are chosen anew
LEAST_PACED_TOKENS = 256.0  # smaller prefills waste more than uneven steps do
FULL = 0.98  # share of the places (slots or KV blocks) in use from which no request can start


class StepSizes:
    """Efficient step sizes: tile edges, up to where longer steps gain little.

    efficiency: share of the best token rate from which steps are not made longer.
    dent: a longer step is preferred if its rate is lower by at most this share.
    beyond: offer longer ones too: time that every step takes may make them worth it (`beside`).
    ratios: measured / profile by the bit length of the token count (`OnlineCostModel.size_ratios`).
    """

    def __init__(
        self,
        profile: CostModel,
        max_step_tokens: int,
        efficiency: float,
        dent: float = DENT,
        ratios: Sequence[float] = (),
        beyond: bool = False,
    ) -> None:
        self._profile = profile
        self._ratios = ratios or (1.0,) * (max_step_tokens.bit_length() + 1)
        self._most = max_step_tokens
        self._efficiency = efficiency
        self._dent = dent
        self._beyond = beyond

    def like(self, efficiency: float, dent: float = DENT, beyond: bool = False) -> StepSizes:
        """Others, for the same profile and ratios: their rates take milliseconds to compute."""
        other = StepSizes(self._profile, self._most, efficiency, dent, self._ratios, beyond)
        other._rates = self._rates
        return other

    def at_most(self, num_tokens: int) -> int:
        """The longest step up to num_tokens with (nearly) the least time per token.

        At most the size that reaches `efficiency` of the best rate of all, because longer steps
        would only make decodes slower and micro-batches uneven.
        """
        size = self._cheapest[min(num_tokens, self._most)]
        if self._beyond and size < num_tokens:
            at = bisect_right(self._candidates, (num_tokens, math.inf))
            size = max([size, *[n for n, _ in self._candidates[at - 1 : at]]])
        return size

    def beside(self, mix: Mix, share: float, outside_s: float = 0.0) -> int:
        """The shortest step with this share of the best prefill rate beside these decodes.

        In longer steps more prefill tokens share the time of the decodes."""
        profile, num_decodes = self._profile, mix.num_decodes
        fixed_s = profile.stage_s(mix) - profile.linear_s(mix.num_tokens) + outside_s
        rates = [_rate(n - num_decodes, fixed_s + linear_s) for n, linear_s in self._candidates]
        enough = share * max(rates)
        return next(
            n for (n, _), rate in zip(self._candidates, rates, strict=True) if rate >= enough
        )

    @cached_property
    def _candidates(self) -> list[tuple[int, float]]:
        """Efficient sizes, a tenth apart, and what depends on the tokens alone, in seconds."""
        found, n = {self._local_best(self._most)}, 16.0
        while n < self._most:
            found.add(self._local_best(int(n)))
            n *= APART
        return [(n, self._linear_s(n)) for n in sorted(found)]

    def _local_best(self, num_tokens: int) -> int:
        size = self._cheapest[num_tokens]
        if not self._beyond or size * APART > num_tokens:
            return size
        near = range(int(num_tokens / APART) + 1, num_tokens + 1)
        return max(near, key=lambda n: _rate(n, self._profile.overhead_s + self._linear_s(n)))

    def _linear_s(self, num_tokens: int) -> float:
        return self._profile.linear_s(num_tokens) * self._ratios[num_tokens.bit_length()]

    @cached_property
    def _rates(self) -> list[float]:
        """Tokens per second, by the number of tokens."""
        overhead_s, linear_s, ratios = (
            self._profile.overhead_s,
            self._profile.linear_s,
            self._ratios,
        )
        sizes = range(self._most + 1)
        return [_rate(n, overhead_s + linear_s(n) * ratios[n.bit_length()]) for n in sizes]

    @cached_property
    def _cheapest(self) -> list[int]:
        """The size for each number of tokens, without longer ones."""
        most, rates = self._most, self._rates
        enough = self._efficiency * max(rates)
        if not enough:  # a fit with almost no time per token
            return list(range(most + 1))
        sizes, chosen, best = [0], 0, 0.0
        for n in range(1, most + 1):
            best = max(best, rates[n])
            if rates[chosen] < enough and rates[n] >= (1.0 - self._dent) * best:
                chosen = n
            sizes.append(chosen)
        return sizes


def _rate(num_tokens: int, seconds: float) -> float:
    """Tokens per second; 0.0 (unknown) if a fit to noise predicts no time."""
    return num_tokens / seconds if seconds > 0.0 else 0.0


@dataclass(slots=True)
class SizeChoice:
    """The sizes at which steps end (bound 2 of `adaptive`), by the profile or by what is learned of
    each size."""

    cost: OnlineCostModel
    max_step_tokens: int
    efficiency: float
    ease: float
    follow_learnt: bool
    usual: StepSizes = field(init=False)  # up to where longer steps gain little
    fastest: StepSizes = field(init=False)  # while requests wait
    efficient_tokens: int = field(init=False)  # the longest usual step
    _background_tokens: int = field(init=False)  # the longest step of the background alone
    _ratios: list[float] = field(init=False, default_factory=list)  # that both sizes are for
    num_answered: int = field(init=False, default=0)  # steps; says which of them try and look

    def __post_init__(self) -> None:
        self._choose()

    def _choose(self) -> None:
        profile, most = self.cost.profile, self.max_step_tokens
        if self.follow_learnt:
            self._ratios = self.cost.size_ratios(most)
        self.usual = StepSizes(profile, most, self.efficiency, ratios=self._ratios)
        self.fastest = self.usual.like(1.0, 0.0, beyond=self.follow_learnt)
        self.efficient_tokens = self.usual.at_most(most)
        self._background_tokens = self.usual.like(BACKGROUND_EFFICIENCY).at_most(most)

    def look_again(self) -> None:
        """Call every `LOOK_EVERY` answered steps."""
        if self.follow_learnt:
            now = zip(self.cost.size_ratios(self.max_step_tokens), self._ratios, strict=True)
            if any(not 1 / OUTDATED < ratio / used < OUTDATED for ratio, used in now):
                self._choose()

    @property
    def hand_over_tokens(self) -> int:
        """Of a step of an engine whose streams leave. It delays no token but the first ones behind
        it, and its KV is saved beside the next. So it is as long as makes prompts cheap."""
        most = self.max_step_tokens
        cheap = StepSizes(self.cost.profile, most, HAND_OVER_EFFICIENCY).at_most(most)
        return min(most, max(cheap, LEAST_HAND_OVER))

    def of_background(self, least: int) -> int:
        """The most tokens of a step without live requests."""
        return max(self._background_tokens, least)

    def in_queue(self, mix: Mix, outside_s: float) -> tuple[StepSizes | None, int]:
        """The sizes (None: any) and the most tokens of a step of `mix` while requests wait.

        outside_s: between two steps. With a fixed profile it is not counted."""
        outside_s *= self.follow_learnt
        most = max(self.efficient_tokens, self.fastest.beside(mix, self.ease, outside_s))
        if self.follow_learnt and self.num_answered % EXPLORE_EVERY == 0:
            return None, min(EXPLORE_FACTOR * most, self.max_step_tokens)
        return self.fastest, most


@dataclass(slots=True)
class Pace:
    """Prefill as fast as decodes free places: prompts computed earlier would only wait for one.

    Searches the balance (prompt tokens per output token, and some advance while places are left):
    a step without prefill, because waiting prompts find no free place, shows that prefill was too
    fast and lowers the pace; every other step raises it a little. In equilibrium about one step in
    ten is without prefill.
    """

    change: float  # as a share, per step; 0: no pacing
    max_step_tokens: int
    max_requests: int
    tokens: float = math.inf  # from the first step on between the least worth it and the most

    def next_tokens(self, engine: EngineView) -> int:
        """Call once per planning: most prefill tokens of the step."""
        if not self.change:
            return self.max_step_tokens
        running = len(engine.decoding) + len(engine.prefilling)
        used_blocks = engine.num_blocks - engine.num_free_blocks
        used = max(running / self.max_requests, used_blocks / engine.num_blocks)
        if engine.num_waiting and used >= FULL and not engine.prefilling:
            self.tokens *= 1.0 - 9.0 * self.change
        elif engine.num_waiting:
            self.tokens *= 1.0 + self.change
        self.tokens = min(float(self.max_step_tokens), max(self.tokens, LEAST_PACED_TOKENS))
        return int(self.tokens)


def add_chunk(
    profile: CostModel, mix: Mix, start: int, wanted: int, limit_s: float, sizes: StepSizes | None
) -> bool:
    """Add as much of a chunk to `mix` as fits; returns whether all of it did.

    One that is cut ends where tokens are cheapest: step time jumps just past a tile edge."""
    tokens = mix.num_tokens
    chunk = profile.largest_chunk(mix, start, wanted, limit_s)
    if sizes and 0 < chunk < wanted:
        best = sizes.at_most(tokens + chunk)
        chunk = best - tokens if best > tokens else chunk
    if chunk:
        mix.add(start, chunk, profile.attention_window)
    return chunk == wanted
