"""How much slower than its model a machine was, step by step, for a simulation to draw from."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterable

_NEIGHBOURS = 32  # steps like the one simulated, of which one is drawn


class StepRatios:
    """measured / modeled of steps that ran, with what the model said of each.

    A step is slowed as a similar one was: with prefill or without, and of about the same modeled
    time. What steals memory bandwidth slows decodes, what steals cores slows prefill, and what
    wakes up between steps is a larger share of short ones: one factor would not do for all.
    """

    def __init__(
        self, alone: Iterable[tuple[float, float]], mixed: Iterable[tuple[float, float]]
    ) -> None:
        """(modeled seconds, ratio) of decodes alone and of steps with prefill; where there are
        none of one kind, those of the other serve for both."""
        by_kind = [sorted(alone), sorted(mixed)]
        if not any(by_kind):
            raise ValueError("no steps to draw from")
        first, second = by_kind
        self._pools = tuple(
            ([seconds for seconds, _ in pool], [ratio for _, ratio in pool])
            for pool in (first or second, second or first)
        )

    def draw(self, with_prefill: bool, modeled_s: float, rng: random.Random) -> float:
        seconds, ratios = self._pools[with_prefill]
        middle = bisect_left(seconds, modeled_s)
        last = max(0, len(seconds) - _NEIGHBOURS)
        first = min(max(0, middle - _NEIGHBOURS // 2), last)
        return ratios[rng.randrange(first, min(first + _NEIGHBOURS, len(ratios)))]
