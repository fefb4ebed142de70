"""By how much the newest steps took longer than such steps usually do.

The mean and the bound of a kind of step follow hundreds of steps, half a minute of long ones. A
burst of requests slows all steps at once: their arrival, their refusals and their streams take time
on the cores on which steps run. The first long step beside a burst would miss the objective of
every stream, and so would the next ones until the bound has seen enough of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NEWEST_S = 0.5  # of computed time
MOST = 0.5  # a single step counts for no more
LEAST = 0.01  # less than this is nothing: no decision hangs on the rounding of a time


@dataclass(slots=True)
class PresentSlowness:
    """log_ratio: of measured over usual time, never below 0: fast steps promise nothing."""

    _mean: float = 0.0

    @property
    def log_ratio(self) -> float:
        return self._mean if self._mean > LEAST else 0.0

    def add(self, log_ratio: float, usual_s: float) -> None:
        """Note a step. log_ratio: of its time over `usual_s`, that of its kind. Long steps count
        for more, as a delay of a millisecond is a large part of a short one."""
        weight = 1.0 - math.exp(-usual_s / NEWEST_S)
        self._mean += weight * (max(-MOST, min(MOST, log_ratio)) - self._mean)
