"""Places kept for refused requests that may return at the time given by `Retry-After`.

A client that waits as told must not be refused again because others arrived meanwhile. So later
requests are refused too while the work of those that may return fills the queue. Many clients never
return, so their work is weighted by the share that returned lately. It counts only against
requests of the same tenant and of no higher priority, because others may be served before them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from actors.scheduling.events import MayReturn

WEIGHT = 0.1  # of one request in the share that returns
_FEW = 64  # entries of a heap, which is not worth cleaning
MOST_PLACES = 4096  # requests refused beyond these have none
TOGETHER_S = 0.1  # equal requests this close are several, as of `n`, not one that does not wait
LONGER, SHORTER, MOST_STRETCH = 1.05, 0.995, 2.0  # in balance nine of ten that return are served


class Place(NamedTuple):
    """from_s, until_s: when its request is expected to return."""

    until_s: float
    from_s: float
    refused: MayReturn


@dataclass(slots=True)
class Returning:
    """Refused requests that may return. Times are on one clock, which never goes back.

    share: of refused requests, those that returned lately as they were told.
    stretch: how much longer their work has taken than it was predicted to.
    """

    share: float = 0.0
    stretch: float = 1.0
    _by_key: dict[int, list[Place]] = field(default_factory=dict)
    _num_places: int = 0  # in `_by_key`
    _by_end: list[Place] = field(default_factory=list)  # a heap; of those in `_by_key` and others
    # Work of those in `_by_key`, by tenant and priority.
    _work_s: dict[str, dict[int, float]] = field(default_factory=dict)
    _num_of: Counter[str] = field(default_factory=Counter)  # places, by tenant

    def __len__(self) -> int:
        """The number of different requests that may return."""
        return len(self._by_key)

    def refused(self, refused: MayReturn, now_s: float) -> None:
        self._give_up(now_s)
        if self._num_places == MOST_PLACES:
            return
        after_s, before_s = refused.expected_s
        place = Place(now_s + before_s, now_s + after_s, refused)
        self._by_key.setdefault(refused.key, []).append(place)
        self._num_places += 1
        heappush(self._by_end, place)
        if len(self._by_end) > 2 * self._num_places + _FEW:  # most have been taken
            self._by_end = [one for places in self._by_key.values() for one in places]
            heapify(self._by_end)
        self._num_of[refused.tenant] += 1
        work_s = self._work_s.setdefault(refused.tenant, {})
        work_s[refused.priority] = work_s.get(refused.priority, 0.0) + refused.work_s

    def take(self, key: int, now_s: float) -> Place | None:
        """The place of a request that arrives; None if none is kept for it, or if it arrives too
        early: a client that does not wait counts as one that arrives later."""
        self._give_up(now_s)
        if key not in self._by_key:
            return None
        place = min(self._by_key[key])
        since_s = now_s - place.from_s + place.refused.expected_s[0]
        if since_s < min(TOGETHER_S, place.refused.expected_s[0]):
            return None
        self._drop(place)
        if now_s < place.from_s:
            self.share -= WEIGHT * self.share
            return None
        self.share += WEIGHT * (1.0 - self.share)
        return place

    def judged(self, is_served: bool) -> None:
        """One that returned as told is served, or refused again."""
        factor = SHORTER if is_served else LONGER
        self.stretch = min(MOST_STRETCH, max(1.0, self.stretch * factor))

    def ahead_s(
        self, now_s: float, tenant: str, priority: int = 0, place: Place | None = None
    ) -> float:
        """The work that may return ahead of such a request: all of it, or what is before the
        request's place, if it has one. Multiplied by `share`, it is the expected work."""
        self._give_up(now_s)
        if not self._by_key:
            return 0.0
        if place is None:
            sums_s = self._work_s.get(tenant, {})
            work_s = sum([work_s for other, work_s in sums_s.items() if other >= priority])
        else:
            work_s = sum(
                [
                    one.refused.work_s
                    for places in self._by_key.values()
                    for one in places
                    if one.from_s < place.from_s
                    and one.refused.tenant == tenant
                    and one.refused.priority >= priority
                ]
            )
        return self.stretch * work_s

    def _give_up(self, now_s: float) -> None:
        while self._by_end and self._by_end[0].until_s < now_s:
            place = heappop(self._by_end)
            if place in self._by_key.get(place.refused.key, ()):
                self._drop(place)
                self.share -= WEIGHT * self.share

    def _drop(self, place: Place) -> None:
        key, work_s, _, tenant, priority = place.refused
        places, sums_s = self._by_key[key], self._work_s[tenant]
        places.remove(place)
        self._num_places -= 1
        if not places:
            del self._by_key[key]
        sums_s[priority] -= work_s
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:  # clients choose the names
            del self._num_of[tenant], self._work_s[tenant]  # and with it what rounding has left
