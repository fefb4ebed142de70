"""The time of a token outside the stages: between steps, and on its way to the client."""

from __future__ import annotations

from dataclasses import dataclass

from actors.scheduling.cost.online import OnlineCostModel, RecentQuantile
from actors.scheduling.interfaces import EngineView
from actors.scheduling.plan import StepShape

OUTSIDE_SHARE = 0.1  # of the objective: more time between two steps than this is not planned for
MOST_GIVEN, MOST_LEARNT, FADES = 0.1, 0.25, 0.125  # see `WayToClient`


class TimeOutside:
    """The time of an answer beyond its step (scheduling, transport, wake-up), `seconds` at most.

    It stays zero with several stages, whose overlap hides it.
    """

    def __init__(self, cost: OnlineCostModel) -> None:
        self.seconds = 0.0  # the learned quantile of what was measured
        self._recent = RecentQuantile(cost.quantile, max(cost.memory, 1), (0.0,))
        self._is_hidden = cost.profile.num_stages > 1
        self._answered: list[tuple[StepShape, float]] = []  # since the last planning: two at most
        self._planned_at_s = 0.0  # when that was

    def answered(self, shape: StepShape, duration_s: float) -> None:
        del self._answered[:-1]  # not every policy asks for a budget
        self._answered.append((shape, duration_s))

    def planning(self, engine: EngineView, tbt_s: float) -> tuple[StepShape, float] | None:
        """Call once per planning. Returns the step that alone was answered since the last call, and
        the seconds since then; None: it is unknown when that step began."""
        answered, gap_s = self._answered, engine.now_s - self._planned_at_s
        self._answered, self._planned_at_s = [], engine.now_s
        # A single one began at the last call, when that before it was answered or nothing ran.
        if len(answered) != 1 or self._is_hidden or not (engine.decoding or engine.prefilling):
            return None
        ((shape, duration_s),) = answered
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
