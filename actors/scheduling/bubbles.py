"""How long each pipeline stage stands idle between micro-batches while there is work."""

from __future__ import annotations

from collections.abc import Sequence


class BubbleMeter:
    """Adds up busy and bubble time per stage from the (start, end) times of each step.

    A bubble is a gap between two steps of a stage, less the time when the whole pipeline was
    empty (no work is no bubble).

    >>> meter = BubbleMeter()
    >>> meter.observe([(0.0, 1.0), (1.0, 2.0)])
    >>> meter.observe([(1.0, 4.0), (4.0, 5.0)])
    >>> meter.busy_s, meter.bubble_s
    ([4.0, 2.0], [0.0, 2.0])
    """

    __slots__ = ("_previous", "bubble_s", "busy_s")

    def __init__(self) -> None:
        self.busy_s: list[float] = []
        self.bubble_s: list[float] = []
        self._previous: Sequence[tuple[float, float]] = ()

    def observe(self, stage_times_s: Sequence[tuple[float, float]]) -> None:
        """The next step in order took so long in each stage (seconds on one clock)."""
        if len(stage_times_s) != len(self.busy_s):
            self.busy_s = [0.0] * len(stage_times_s)
            self.bubble_s = [0.0] * len(stage_times_s)
            self._previous = ()
        previous = self._previous
        empty_s = max(0.0, stage_times_s[0][0] - previous[-1][1]) if previous else 0.0
        for stage, (start, end) in enumerate(stage_times_s):
            self.busy_s[stage] += end - start
            if previous:
                self.bubble_s[stage] += max(0.0, start - previous[stage][1] - empty_s)
        self._previous = stage_times_s

    def fractions(self) -> list[float]:
        """Bubble time over busy and bubble time, per stage."""
        return [
            bubble / (busy + bubble) if busy + bubble > 0 else 0.0
            for busy, bubble in zip(self.busy_s, self.bubble_s, strict=True)
        ]
