"""How late tokens reach their readers after the scheduler has sent them.

A token that waits for the replica's event loop, which also parses, tokenizes and refuses requests,
lengthens the gap before it, as a longer step would. The scheduler is told by how much, and plans
shorter steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.scheduling.cost.online import RecentQuantile

WATCHED = 256  # deliveries
REPORT_EVERY = 32
QUANTILE = 0.99


class DeliveryTimes:
    """The delays of one scheduler's messages. Clocks may differ: only changes of a delay count,
    as a constant one lengthens no gap."""

    def __init__(self) -> None:
        self._longer = RecentQuantile(QUANTILE, WATCHED, [0.0])
        self._last_s: float | None = None  # the last delay

    def report(self, delays_s: Sequence[float]) -> float:
        """By how much a delay exceeds the one before, at its quantile.

        delays_s: of the deliveries since the last report, in their order.
        """
        for delay_s in delays_s:
            if self._last_s is not None:
                self._longer.add(max(0.0, delay_s - self._last_s))
            self._last_s = delay_s
        return self._longer.value
