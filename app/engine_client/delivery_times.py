"""How late tokens reach their readers after the scheduler has sent them.

A token that waits for the replica's event loop, which also parses, tokenizes and refuses requests,
lengthens the gap before it, as a longer step would. The scheduler is told by how much, and plans
shorter steps.
"""

from __future__ import annotations

from actors.scheduling.cost.online import RecentQuantile

WATCHED = 256  # deliveries
REPORT_EVERY = 32
QUANTILE = 0.99
LEAST_CHANGE_S = 0.0005


class DeliveryTimes:
    """The delays of one scheduler's messages. Clocks may differ: only changes of a delay count,
    as a constant one lengthens no gap."""

    def __init__(self) -> None:
        self._longer = RecentQuantile(QUANTILE, WATCHED, [0.0])
        self._last_delay_s: float | None = None
        self._num_new = 0  # since the last report
        self._reported_s = 0.0

    def delivered(self, sent_s: float, now_s: float) -> float | None:
        """The tokens of a message sent at sent_s, on the scheduler's clock, are with their readers.

        Returns, where there is news: by how much a delay exceeds the one before, at its quantile.
        """
        delay_s = now_s - sent_s
        last_s, self._last_delay_s = self._last_delay_s, delay_s
        if last_s is None:
            return None
        self._longer.add(max(0.0, delay_s - last_s))
        self._num_new += 1
        if self._num_new < REPORT_EVERY:
            return None
        self._num_new, longer_s = 0, self._longer.value
        if abs(longer_s - self._reported_s) < LEAST_CHANGE_S:
            return None
        self._reported_s = longer_s
        return longer_s
