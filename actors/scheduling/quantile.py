"""A quantile of what was seen lately: exact, forgetful, a microsecond an observation."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable


class RecentQuantile:
    """The value that `share` of the last `size` observations do not exceed.

    Rounded down to an observation: with few of them the worst one is no quantile yet.
    seeds: what to assume until observations have pushed them out, oldest first; they count as
    observations.

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
        ordered = self._ordered
        return ordered[int(self.share * (len(ordered) - 1))]
