"""The cost model of a running engine: a profile, corrected by the steps measured since.

The profile was measured on an idle machine. Heat, other load and other prompts change step times
by kind of step (decodes, mixed or prefill; each by size, and with or without a KV move beside it).
For each kind two numbers of log(measured / profile) are kept: a running mean, and a quantile of the
last few hundred values. A kind without measurements starts from the profile's error on held-out
steps, shifted by how much slower than the profile the engine has been so far. Both follow slowly;
on top of them comes what the newest steps took longer (`delays`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from actors.scheduling.config import ConfigError
from actors.scheduling.cost.delays import PresentSlowness
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.interfaces import StepTimePredictor
from actors.scheduling.plan import StepShape

ASSUMED = 20  # weight of a kind's initial value, in observations
INTERRUPTED = math.log(1.5)  # a step this far above the mean was interrupted
STALE = 20  # steps without one of a kind, from which smaller kinds stand in for it
LEFT = 0.5  # of a deviation, in steps a size larger: of four times the tokens, it averages out


class RecentQuantile:
    """The value that `share` of the last `size` observations do not exceed.

    Rounded down to an observation, so that of few observations the worst is not the quantile.
    seeds: initial observations, oldest first, replaced by later ones.

    >>> recent = RecentQuantile(0.9, size=10, seeds=[5.0])
    >>> for value in range(4):
    ...     recent.add(value)
    >>> recent.value
    3
    """

    __slots__ = ("_ordered", "_recent", "share")

    def __init__(self, share: float, size: int, seeds: Iterable[float] = ()) -> None:
        """Raises ValueError unless 0 < share < 1 and size is positive."""
        if not 0.0 < share < 1.0 or size < 1:
            raise ValueError(f"need 0 < share < 1 and size >= 1, got {share}, {size}")
        self.share = share
        self._recent = deque(seeds, maxlen=size)
        self._ordered = sorted(self._recent)

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, value: float) -> None:
        recent, ordered = self._recent, self._ordered
        if len(recent) == recent.maxlen:
            del ordered[bisect_left(ordered, recent[0])]
        recent.append(value)
        insort(ordered, value)

    @property
    def value(self) -> float:
        """Raises IndexError before any observation or seed."""
        return self.at(self.share)

    def at(self, share: float) -> float:
        """The value for another share."""
        ordered = self._ordered
        return ordered[int(share * (len(ordered) - 1))]


@dataclass(slots=True)
class Mean:
    """A running mean that forgets: `log_ratio` after `count` observations."""

    log_ratio: float
    count: int = 0

    def add(self, value: float, memory: int) -> None:
        self.count += 1
        # One outlier (a page fault, a collection) must not move the mean by its full size.
        step = max(-0.5, min(0.5, value - self.log_ratio))
        self.log_ratio += step * max(1.0 / self.count, 1.0 / memory)


DECODES, PREFILL, MIXED = range(3)  # what a step holds
_BESIDE_MOVE = 3  # added to these
_SIZES = 16  # more than there are


class StepKind(NamedTuple):
    """Steps that share a correction. size: half the bit length of their number of tokens."""

    beside_move: bool
    content: int  # one of those above
    size: int

    @classmethod
    def numbered(cls, number: int) -> StepKind:
        """The inverse of `_number`."""
        content, size = divmod(number, _SIZES)
        beside_move, content = divmod(content, _BESIDE_MOVE)
        return cls(bool(beside_move), content, size)


def _number(mix: Mix) -> int:
    """The kind of such a step as a number, which every prediction makes and looks up: a `StepKind`
    would take twice as long."""
    content = DECODES if not mix.prefill_tokens else PREFILL if not mix.num_decodes else MIXED
    size = (mix.num_decodes + mix.prefill_tokens).bit_length() // 2
    return (_BESIDE_MOVE * mix.beside_move + content) * _SIZES + size


@dataclass(slots=True)
class Regime:
    """Correction of a kind of step, in logs of measured / profile. last: number of the last one."""

    mean: Mean
    bound: RecentQuantile
    last: int = 0


class OnlineCostModel:
    """A profile with learned corrections. Implements `interfaces.StepTimePredictor`.

    quantile: share of steps that should take no longer than `bound_factor` promises.
    memory: observations after which older ones lose weight; 0 switches learning off.
    stands_in: the change of smaller steps counts for larger ones that are not run. One bad moment
        may raise the bound of larger steps so far that they are never run, nor measured, again.
    """

    def __init__(self, profile: CostModel, quantile: float = 0.99, memory: int = 200) -> None:
        if not 0.5 <= quantile < 1.0:
            raise ValueError(f"quantile must lie in [0.5, 1), got {quantile}")
        self.profile = profile
        self.quantile = quantile
        self.memory = memory
        self.stands_in = False
        self._num_steps = 0
        self._regimes: dict[int, Regime] = {}  # by `_number`
        self._overall = Mean(0.0)
        self._present = PresentSlowness()
        # Two at the quantile: one alone would count as a hiccup (see `RecentQuantile`).
        shares = [*((k + 0.5) / ASSUMED for k in range(ASSUMED - 2)), quantile, quantile]
        self._assumed = [math.log(max(profile.ratio_at(q), 1e-9)) for q in shares]
        for number, mean, bound in profile.learnt:
            seeds = [mean] * (ASSUMED - 2) + [bound, bound]
            self._regimes[number] = Regime(Mean(mean, ASSUMED), self._recent(seeds))

    # ---- interfaces.StepTimePredictor ---------------------------------------------------------

    def step_s(self, shape: StepShape) -> float:
        """Expected seconds of the slowest stage."""
        mix = Mix.of_shape(shape, self.profile.attention_window)
        return self.profile.stage_s(mix) * self.ratio(mix)

    def usual_s(self, shape: StepShape) -> float:
        """Like `step_s`, as if the newest steps had taken no longer than usual."""
        return self.step_s(shape) * math.exp(-self._present.log_ratio)

    def latency_s(self, shape: StepShape) -> float:
        """Expected seconds through all stages of an idle pipeline."""
        mix = Mix.of_shape(shape, self.profile.attention_window)
        return self.profile.latency_s(mix) * self.ratio(mix)

    def swap_s(self, num_blocks: int) -> float:
        """Seconds to move KV blocks one way; infinite if never measured."""
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
        log_ratio = math.log(duration_s / predicted_s)
        regime = self._regime(mix)
        change, slowness = log_ratio - regime.mean.log_ratio, self._present.log_ratio
        if self.stands_in:
            self._stand_in(_number(mix), regime.mean, change)
        if regime.mean.count >= ASSUMED:
            self._present.add(change, duration_s * math.exp(-change))
        regime.mean.add(log_ratio, self.memory)
        # The process lost its core for long; smaller chunks would not have helped.
        regime.bound.add(min(log_ratio - slowness, regime.mean.log_ratio + INTERRUPTED))
        self._overall.add(log_ratio, self.memory)

    def learnt(self) -> CostModel:
        """The profile with the learned corrections, for a later engine."""
        known = tuple(
            (number, regime.mean.log_ratio, regime.bound.value)
            for number, regime in sorted(self._regimes.items())
            if regime.mean.count >= ASSUMED
        )
        return replace(self.profile, learnt=known)

    def forget(self, mix: Mix) -> None:
        """Forget the correction of this kind of step, unless its bound without one is higher."""
        regime = self._regimes.get(_number(mix))
        if regime is not None and regime.bound.value > self._assumed[-1] + self._shift:
            del self._regimes[_number(mix)]

    # ---- for budgets and admission ----------------------------------------------------

    @property
    def slowness(self) -> float:
        """Log of how much longer than usual the newest steps took; never below 0."""
        return self._present.log_ratio

    def ratio(self, mix: Mix) -> float:
        """Learned measured / profile ratio of this kind of step at present."""
        regime = self._regimes.get(_number(mix))
        usual = self._shift if regime is None else regime.mean.log_ratio
        return math.exp(usual + self._present.log_ratio)

    def bound_factor(self, mix: Mix, caution: float = 1.0) -> float:
        """Factor on the profile's prediction that `quantile` of such steps stay below.

        caution: above 1, the bound lies so many times as far from the mean, for shares of steps
        that too few were seen to measure (1.5: 0.999 in place of 0.99, of exponential errors).
        """
        regime = self._regimes.get(_number(mix))
        if regime is None:
            mean, bound = self._shift, self._assumed[-1] + self._shift
        else:
            mean, bound = regime.mean.log_ratio, regime.bound.value
        return math.exp(bound + (caution - 1.0) * max(0.0, bound - mean) + self._present.log_ratio)

    def size_ratios(self, most: int) -> list[float]:
        """Learned measured / profile ratio of steps with prefill, by the bit length of their token
        count, up to that of `most`.

        Interpolated between the sizes that were met; beyond them that of the nearest holds, as a
        profile that is wrong of all sizes met is no better of the others.
        """
        met = [(StepKind.numbered(number), regime) for number, regime in self._regimes.items()]
        known = {
            kind.size: regime.mean.log_ratio
            for content in (PREFILL, MIXED)  # mixed steps count where both were met
            for kind, regime in met
            if kind[:2] == (False, content) and regime.mean.count >= ASSUMED
        }
        sizes = sorted(known)
        ratios = []
        for length in range(most.bit_length() + 1):
            size = (length - 0.5) / 2  # the middle of this length, on the scale of `StepKind.size`
            after = bisect_left(sizes, size)
            below, above = sizes[max(0, after - 1) : after], sizes[after : after + 1]
            if below and above:
                share = (size - below[0]) / (above[0] - below[0])
                log_ratio = known[below[0]] + share * (known[above[0]] - known[below[0]])
            else:
                log_ratio = known[(below or above)[0]] if sizes else 0.0
            ratios.append(math.exp(log_ratio))
        return ratios

    @property
    def _shift(self) -> float:
        """How much slower than the profile the engine has been, for kinds without measurements.

        Never below 0: what makes one kind of step faster need not do so for another.
        """
        return max(0.0, self._overall.log_ratio)

    def _regime(self, mix: Mix) -> Regime:
        number = _number(mix)
        regime = self._regimes.get(number)
        if regime is None:
            seeds = [value + self._shift for value in self._assumed]
            regime = self._regimes[number] = Regime(Mean(self._shift), self._recent(seeds))
        return regime

    def _stand_in(self, number: int, mean: Mean, change: float) -> None:
        """Note a step of this kind, which took `change` more than the mean of its kind, also for
        larger ones of its content not run lately: their means move alike, but they vary less."""
        self._num_steps += 1
        self._regimes[number].last = self._num_steps
        if mean.count < ASSUMED:
            return
        change = max(-0.5, min(0.5, change))
        for larger in range(number + 1, number - number % _SIZES + _SIZES):
            regime = self._regimes.get(larger)
            if regime is not None and self._num_steps - regime.last > STALE:
                left = LEFT ** (larger - number) * (change - self._present.log_ratio)
                log_ratio = regime.mean.log_ratio + left
                regime.mean.log_ratio += change / self.memory
                regime.bound.add(min(log_ratio, regime.mean.log_ratio + INTERRUPTED))

    def _recent(self, seeds: Iterable[float]) -> RecentQuantile:
        return RecentQuantile(self.quantile, max(self.memory, ASSUMED), seeds)


def read_cost_model(data: Mapping[str, Any] | None) -> OnlineCostModel | None:
    """The learning cost model of a configuration, or None. Raises ConfigError for other data."""
    if data is None:
        return None
    try:
        return OnlineCostModel(CostModel.from_dict(data))
    except (ValueError, TypeError) as error:
        raise ConfigError("cost_model", str(error)) from error


def cost_model_for(setting: str, part: str, cost: StepTimePredictor | None) -> OnlineCostModel:
    """`cost`, if there is one; else raises ConfigError naming the setting that needs it."""
    if not isinstance(cost, OnlineCostModel):
        raise ConfigError(setting, f"{part!r} needs a cost model: run `legato profile`")
    return cost
