"""What comes on top of a step's own time: between two steps, by requests that arrive, and on the
way to the client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from actors.scheduling.cost.online import OnlineCostModel, RecentQuantile
from actors.scheduling.interfaces import EngineView
from actors.scheduling.plan import StepShape

OUTSIDE_SHARE = 0.1  # of the objective: more time outside the stages than this is not planned for
MOST_GIVEN, MOST_LEARNT, FADES = 0.1, 0.25, 0.125  # see `WayToClient`
MOST_ARRIVALS = 0.15  # of a step's time limit is left for requests that arrive
REMEMBERED, ASSUMED, FOLLOWS = 64, 4, 0.25  # see `ArrivalCost`
DELIVERIES = 2.0  # as long as the way to the client an arrival takes at first, so many times


class TimeOutside:
    """The time of an answer beyond its step (scheduling, transport, wake-up), `seconds` at most.

    It stays zero with several stages, whose overlap hides it.
    """

    def __init__(self, cost: OnlineCostModel) -> None:
        self.seconds = 0.0  # the learned quantile of what was measured
        self._recent = RecentQuantile(cost.quantile, max(cost.memory, 1), (0.0,))
        self._is_hidden = cost.profile.num_stages > 1
        self._answered: list[tuple[StepShape, float]] = []  # since the last planning: two at most
        self._planned_at_s: float | None = None  # when that was

    def answered(self, shape: StepShape, duration_s: float) -> None:
        del self._answered[:-1]  # not every policy asks for a budget
        self._answered.append((shape, duration_s))

    def planning(self, engine: EngineView, tbt_s: float) -> tuple[StepShape, float] | None:
        """Call once per planning. Returns the step that alone was answered since the last call, and
        the seconds since then; None: it is unknown when that step began."""
        answered, planned_at_s = self._answered, self._planned_at_s
        self._answered, self._planned_at_s = [], engine.now_s
        # A single one began at the last call, when that before it was answered or nothing ran.
        if len(answered) != 1 or self._is_hidden or not (engine.decoding or engine.prefilling):
            return None
        if planned_at_s is None:  # the budget was changed meanwhile
            return None
        ((shape, duration_s),), gap_s = answered, engine.now_s - planned_at_s
        self._recent.add(min(max(0.0, gap_s - duration_s), OUTSIDE_SHARE * tbt_s))
        self.seconds = self._recent.value
        return shape, gap_s

    @property
    def median_s(self) -> float:
        return self._recent.at(0.5)


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
        """Of this objective."""
        given = min(self.given_s / tbt_s, MOST_GIVEN)
        return max(self.headroom, given, min(self.learnt_s / tbt_s, MOST_LEARNT))


@dataclass(slots=True)
class ArrivalCost:
    """The time that requests add to the step during which they arrive.

    Reading one, tokenizing it and sending its answer takes milliseconds of the cores on which steps
    run, and so does its client, if it is on them too. A burst of requests lengthens the first step
    beside it, before any step has shown that times have changed.

    delivery_s: the time left for the way to clients: `DELIVERIES` times it is what one arrival is
        taken to cost at first, weighted as `ASSUMED` steps; None: nothing is left for arrivals.
    each_s: what it costs, by the steps with arrivals, of which the last `REMEMBERED` count.
    """

    cost: OnlineCostModel
    delivery_s: float | None
    each_s: float = field(init=False)
    _product: float = field(init=False)  # sum of arrivals times additional seconds
    _squares: float = field(init=False, default=float(ASSUMED))  # sum of arrivals squared
    _usual: float = field(init=False, default=0.0)  # arrivals a step, a running mean
    _num_last: int = field(init=False, default=0)
    _num_seen: int | None = field(init=False, default=None)  # at the last planning
    _answered: list[tuple[StepShape, float]] = field(init=False, default_factory=list)  # since then

    def __post_init__(self) -> None:
        self.each_s = DELIVERIES * (self.delivery_s or 0.0)
        self._product = ASSUMED * self.each_s

    def answered(self, shape: StepShape, duration_s: float) -> None:
        del self._answered[:-1]
        self._answered.append((shape, duration_s))

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
        ((shape, duration_s),) = answered
        usual_s = self.cost.usual_s(shape)
        most_s = MOST_ARRIVALS * usual_s * number  # an interrupted step counts for no more
        added_s = max(-most_s, min(duration_s - usual_s, most_s))
        fades = 1.0 - 1.0 / REMEMBERED
        self._product = fades * self._product + number * added_s
        self._squares = fades * self._squares + number * number
        self.each_s = max(0.0, self._product / self._squares)

    def seconds(self, limit_s: float) -> float:
        """What to leave of this limit, where the steps have not slowed down anyway."""
        if self.delivery_s is None or limit_s == math.inf:
            return 0.0
        expected_s = self.each_s * max(self._num_last, self._usual)
        slower_s = limit_s * (1.0 - math.exp(-self.cost.slowness))
        return max(0.0, min(expected_s, MOST_ARRIVALS * limit_s) - slower_s)
