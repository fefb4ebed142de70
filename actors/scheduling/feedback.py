"""Planning for a little less than was promised, as long as promises are being broken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KeptShare:
    """The share of an objective to plan for, so that at most `allowed` of the steps miss it.

    Bounds from predictions know neither what they were not shown (another process on the core, a
    page fault) nor how such delays add up. A miss lowers the share by `rate`; steps that keep
    the objective raise it so slowly that one miss in 1 / `allowed` steps leaves it where it is.
    It begins below one: trust is earned, seven hundred steps for the first tenth.
    """

    allowed: float = 0.0075  # of the hundredth that a P99 objective forgives
    rate: float = 0.02
    least: float = 0.7
    value: float = 0.9

    def note(self, kept: bool) -> None:
        if kept:
            self.value = min(1.0, self.value * (1.0 + self.rate * self.allowed))
        else:
            self.value = max(self.least, self.value * (1.0 - self.rate))
