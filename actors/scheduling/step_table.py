"""Two pieces of arithmetic of the cost model: a table by tokens, and causal attention's work."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise


def causal_pairs(start: int, num_tokens: int, window: int = 0) -> float:
    """(query, key) pairs of a chunk under the causal mask, each query seeing `window` keys at most.

    >>> causal_pairs(0, 4)
    10.0
    >>> causal_pairs(100, 2, window=50)
    100.0
    """
    if not window or start + num_tokens <= window:
        return num_tokens * (start + (num_tokens + 1) / 2)
    if start >= window:
        return float(num_tokens * window)
    ramp = window - start  # queries that still see everything before them
    return ramp * (start + (ramp + 1) / 2) + (num_tokens - ramp) * float(window)


class StepTable:
    """A piecewise-linear function of a token count, with jumps.

    Knots are (tokens, seconds) in order. Between two knots the value is interpolated; a jump
    (tile quantisation: 257 tokens cost far more than 256) is a pair of knots one token apart.
    Beyond the last knot the last slope of at least `tail` tokens goes on.
    """

    __slots__ = ("_dense", "_last_tokens", "_tail_slope", "knots")

    def __init__(self, knots: Iterable[tuple[int, float]]) -> None:
        """Raises ValueError unless knots ascend strictly, start at 0 or more and never fall."""
        points = tuple((int(n), float(s)) for n, s in knots)
        if not points:
            points = ((0, 0.0),)
        for (n0, s0), (n1, s1) in pairwise(points):
            if n1 <= n0 or s1 < s0:
                raise ValueError(f"knots must ascend: ({n0}, {s0}) then ({n1}, {s1})")
        if points[0][0] < 0 or points[0][1] < 0:
            raise ValueError(f"first knot {points[0]} is negative")
        self.knots = points
        dense: list[float] = []
        for (n0, s0), (n1, s1) in pairwise(points):
            if not dense:
                dense = [s0] * n0
            slope = (s1 - s0) / (n1 - n0)
            dense.extend(s0 + slope * i for i in range(n1 - n0))
        if not dense:
            dense = [points[0][1]] * points[0][0]
        dense.append(points[-1][1])
        dense[0] = 0.0  # no tokens, no work
        self._dense = dense
        self._last_tokens = len(dense) - 1
        self._tail_slope = _tail_slope(points)

    def __call__(self, num_tokens: int) -> float:
        if num_tokens <= self._last_tokens:
            return self._dense[num_tokens]
        return self._dense[-1] + (num_tokens - self._last_tokens) * self._tail_slope

    def largest(self, limit_s: float) -> int:
        """The most tokens whose value stays at or below limit_s (0 if none does)."""
        if limit_s < self._dense[-1]:
            return max(0, bisect_right(self._dense, limit_s) - 1)
        if self._tail_slope <= 0.0:
            return self._last_tokens
        return self._last_tokens + int((limit_s - self._dense[-1]) / self._tail_slope)


def _tail_slope(points: tuple[tuple[int, float], ...]) -> float:
    """Slope over the last half of the table: a single tile step would mislead."""
    last_n, last_s = points[-1]
    index = min(bisect_left(points, (last_n // 2, 0.0)), len(points) - 2)
    if index < 0:
        return 0.0
    first_n, first_s = points[index]
    return (last_s - first_s) / (last_n - first_n)
