"""What comes on top of the usual time of a step: now, by arrivals, and on the way to the client.

The mean and the bound of a kind of step follow hundreds of steps, half a minute of long ones. A
burst of requests slows all steps at once: their arrival, their refusals and their streams take time
on the cores on which steps run. The first long step beside a burst would miss the objective of
every stream, and so would the next ones until the bound has seen enough of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

NEWEST_S = 0.5  # of computed time
MOST = 0.5  # a single step counts for no more
LEAST = 0.01  # less than this is nothing: no decision hangs on the rounding of a time
MOST_GIVEN, MOST_LEARNT, FADES = 0.1, 0.25, 0.125  # see `WayToClient`
MOST_ARRIVALS = 0.15  # of a step's time limit is left for requests that arrive
REMEMBERED, ASSUMED_STEPS, FOLLOWS = 64, 4, 0.25  # see `ArrivalCost`
DELIVERIES = 2.0  # as long as the way to the client an arrival takes at first, so many times


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


@dataclass(slots=True)
class ArrivalCost:
    """The time that requests add to the step during which they arrive.

    Reading one, tokenizing it and sending its answer takes milliseconds of the cores on which steps
    run, and so does its client, if it is on them too. A burst of requests lengthens the first step
    beside it, before any step has shown that times have changed.

    delivery_s: the time left for the way to clients: `DELIVERIES` times it is what one arrival is
        taken to cost at first, weighted as `ASSUMED_STEPS` steps; None: nothing is left for them.
    each_s: what it costs, by the steps with arrivals, of which the last `REMEMBERED` count.
    """

    delivery_s: float | None
    each_s: float = field(init=False)
    _product: float = field(init=False)  # sum of arrivals times additional seconds
    _squares: float = field(init=False, default=float(ASSUMED_STEPS))  # sum of arrivals squared
    _usual: float = field(init=False, default=0.0)  # arrivals a step, a running mean
    _num_last: int = field(init=False, default=0)
    _num_seen: int | None = field(init=False, default=None)  # at the last planning
    _answered: list[tuple[float, float]] = field(init=False, default_factory=list)  # since then

    def __post_init__(self) -> None:
        self.each_s = DELIVERIES * (self.delivery_s or 0.0)
        self._product = ASSUMED_STEPS * self.each_s

    def answered(self, duration_s: float, usual_s: float) -> None:
        """Note a step, and what such a step usually takes."""
        del self._answered[:-1]
        self._answered.append((duration_s, usual_s))

    def planning(self, num_arrived: int) -> None:
        """Call once per planning. num_arrived: requests so far."""
        seen, self._num_seen = self._num_seen, num_arrived
        answered, self._answered = self._answered, []
        if seen is None:
            return
        self._num_last = number = num_arrived - seen
        self._usual += FOLLOWS * (number - self._usual)
        if not number or len(answered) != 1:
            return
        ((duration_s, usual_s),) = answered
        most_s = MOST_ARRIVALS * usual_s * number  # an interrupted step counts for no more
        added_s = max(-most_s, min(duration_s - usual_s, most_s))
        fades = 1.0 - 1.0 / REMEMBERED
        self._product = fades * self._product + number * added_s
        self._squares = fades * self._squares + number * number
        self.each_s = max(0.0, self._product / self._squares)

    def seconds(self, limit_s: float, slowness: float) -> float:
        """What to leave of this limit, beyond what it loses because steps have slowed down anyway
        (`PresentSlowness.log_ratio`)."""
        if self.delivery_s is None or limit_s == math.inf:
            return 0.0
        expected_s = self.each_s * max(self._num_last, self._usual)
        slower_s = limit_s * (1.0 - math.exp(-slowness))
        return max(0.0, min(expected_s, MOST_ARRIVALS * limit_s) - slower_s)


@dataclass(slots=True)
class WayToClient:
    """The part of an objective that is left for the way from the engine to the client.

    headroom: share of every objective left for it.
    given_s: the least time left for it; at most a share `MOST_GIVEN` of an objective.
    learnt_s: likewise, as replicas have measured it, and at most `MOST_LEARNT`. Of several the
        slowest counts: a lower report lowers it by a share `FADES` of the difference.
    """

    headroom: float
    given_s: float
    learnt_s: float = 0.0

    def took(self, seconds: float) -> None:
        lower = self.learnt_s - FADES * (self.learnt_s - seconds)
        self.learnt_s = max(seconds, lower)

    def share(self, tbt_s: float) -> float:
        """The share of this objective that is left for the way to the client."""
        given = min(self.given_s / tbt_s, MOST_GIVEN)
        return max(self.headroom, given, min(self.learnt_s / tbt_s, MOST_LEARNT))
