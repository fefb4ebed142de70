"""Scaling on slack: as many engines as keep the objectives, before one is missed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from actors.fleet.scaling.base import MIDDLING_TOKENS, Bounds, EngineLoad, Scaling, serving
from actors.scheduling.registry import within

SHORTEST_S = 0.5  # between two looks at an engine: a shorter span does not show its rate

MARGIN = 1.1  # on work, before an engine is given up: fluctuating traffic must not move engines
MEMORY_S = 4 * 3600.0  # time constant of forgetting that objectives were missed
CAUTION = 0.9  # of the work per engine at which they were
WORST = 2.0  # times the first token without other work: what is later is late for that work
LEAST_SHARE = 0.25  # of the target: one mishap does not multiply the fleet


class _Look(NamedTuple):
    """Arrivals at one engine. num_tokens: of prompts sent to it so far. rate: in engines."""

    at_s: float
    num_tokens: float
    rate: float


class SlackScaling(Scaling):
    """Work in units of engines: what prompts need of the prefill rate, and streams of the steps.

    Both grow in proportion to traffic, where waiting times explode only once it is too late, and
    both are measured against the objectives: an engine's rate is the one that keeps them. So

        engines = (work now + its trend over `ahead_s`) / `target`

    beside two guards: where objectives can no longer be kept (the first token of a prompt, or the
    pace of a stream), by the share of engines where this is so; and where slots or KV memory run
    out, by how far. Work per engine at which objectives were missed is remembered, and for some
    hours engines are not filled as far again: no model of an engine is exact.

    target: share of an engine's time to be used, at most.
    ahead_s: how long an engine takes to start: the trend is followed so far.
    smoothing_s: time constant of the mean that work is judged by.
    calm_s: engines are given up once so long fewer would have done, with `MARGIN` to spare.
    idle_s: with bounds that allow none, the last engine ends after so long without any request.
    """

    def __init__(
        self,
        target: float = 0.5,
        ahead_s: float = 60.0,
        smoothing_s: float = 30.0,
        calm_s: float = 120.0,
        idle_s: float = 300.0,
    ) -> None:
        within(0.05, 1.0, target=target)
        within(0.0, math.inf, ahead_s=ahead_s, calm_s=calm_s, idle_s=idle_s)
        within(0.001, math.inf, smoothing_s=smoothing_s)
        self._target = target
        self._ahead_s = ahead_s
        self._smoothing_s = smoothing_s
        self._calm_s = calm_s
        self._idle_s = idle_s
        self._looks: dict[str, _Look] = {}  # the last at each engine
        self._decided_s: float | None = None  # when it was asked last
        self._level: float | None = None  # of work in engines, smoothed
        self._trend = 0.0  # of the level, a second
        self._most_filled = target  # less while it is remembered that less was too much
        self._was_broken = False
        self._idle_since_s: float | None = None
        self._calm_since_s: float | None = None  # since when fewer engines would do
        self._calm_most = 0  # the most of those fewer that were needed

    def wanted(
        self,
        loads: Mapping[str, EngineLoad],
        num_starting: int,
        num_queued: int,
        now_s: float,
        bounds: Bounds,
    ) -> int:
        here = serving(loads)
        have = len(here) + num_starting
        passed_s = 0.0 if self._decided_s is None else max(0.0, now_s - self._decided_s)
        self._decided_s = now_s
        self._looks = {name: _look(load, self._looks.get(name)) for name, load in loads.items()}
        demand = self._demand(loads, passed_s)
        broken = _needed_for_objectives(here, have)
        target = self._filled(broken > 0, len(here), passed_s)
        needed = max(
            math.ceil(demand / target - 1e-9),
            broken,
            math.ceil(sum([load.used_places for load in here]) - 1e-9),
        )
        needed = self._unless_idle(needed, loads, num_queued, now_s)
        if bounds.clamp(needed) >= have:
            self._calm_since_s = None
            return bounds.clamp(needed)
        # Work that has not quite faded from memory keeps no last engine.
        with_margin = math.ceil(MARGIN * demand / target - 1e-9) if needed else 0
        spared = max(needed, min(have, with_margin))
        return self._calm(bounds.clamp(spared), have, now_s, bounds)

    def _demand(self, loads: Mapping[str, EngineLoad], passed_s: float) -> float:
        """Work in engines, as it will be when an engine asked for now can serve (Holt's method:
        a level and a trend, both smoothed)."""
        streams = sum([load.decode_share for load in loads.values()])
        # What waits longer than it should must be worked off beside what comes.
        backlog_s = sum(
            [
                load.prefill_tokens / load.prefill_rate
                for load in loads.values()
                if load.prefill_rate
            ]
        )
        seen = sum([look.rate for look in self._looks.values()]) + streams
        if self._level is None:
            self._level = seen
        if passed_s > 0:
            weight = 1.0 - math.exp(-passed_s / self._smoothing_s)
            expected = self._level + self._trend * passed_s
            level = expected + weight * (seen - expected)
            slow = 1.0 - math.exp(-passed_s / (4.0 * self._smoothing_s))
            self._trend += slow * ((level - self._level) / passed_s - self._trend)
            self._level = level
        ahead = max(0.0, self._trend) * self._ahead_s
        return max(0.0, self._level) + ahead + backlog_s / max(self._ahead_s, self._smoothing_s)

    def _filled(self, is_broken: bool, num_engines: int, passed_s: float) -> float:
        """Share to which engines may be filled: `target`, or less if less was too much.

        Learnt when the first is missed: later a backlog causes misses at any load.
        """
        most = self._most_filled * math.exp(passed_s / MEMORY_S)
        if is_broken and not self._was_broken and num_engines and self._level is not None:
            most = min(most, CAUTION * self._level / num_engines)
        self._was_broken = is_broken
        self._most_filled = min(self._target, max(most, LEAST_SHARE * self._target))
        return self._most_filled

    def _unless_idle(
        self, needed: int, loads: Mapping[str, EngineLoad], num_queued: int, now_s: float
    ) -> int:
        """0 after a sufficient idle time, otherwise at least one engine."""
        if num_queued or any(load.num_running or load.num_waiting for load in loads.values()):
            self._idle_since_s = None
            return max(needed, 1)
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        if now_s - self._idle_since_s >= self._idle_s or not loads:
            return 0
        return max(needed, 1)

    def _calm(self, needed: int, have: int, now_s: float, bounds: Bounds) -> int:
        """Number of engines that stay: the most needed during the calm time.

        Repeated until the others have ended, because the caller may restart before it acts.
        """
        most = max(needed, self._calm_most)
        if self._calm_since_s is None or most >= have:  # not calm: from here on it may be
            self._calm_since_s, most = now_s, needed
        self._calm_most = most
        return most if now_s - self._calm_since_s >= self._calm_s else bounds.clamp(have)


def _look(load: EngineLoad, last: _Look | None) -> _Look:
    """The rate is that since the last look, which stands where it is too recent to tell."""
    num_tokens = load.prefilled_tokens + load.prefill_tokens
    if last is None:
        return _Look(load.time_s, num_tokens, 0.0)
    passed_s = load.time_s - last.at_s
    if passed_s < SHORTEST_S:
        return last
    came = max(0.0, num_tokens - last.num_tokens) / passed_s
    return _Look(load.time_s, num_tokens, came / load.prefill_rate if load.prefill_rate else 0.0)


def _needed_for_objectives(here: Sequence[EngineLoad], have: int) -> int:
    """Engines needed as objectives are missed: those there are, and more by those that miss them.

    While other engines keep them, the router avoids one that does not; so only what exceeds half of
    them counts. The same misses are seen until an engine has started: those that start are counted.
    """
    excess = sum([_breaks(load) for load in here]) - len(here) / 2
    return max(have, len(here) + math.ceil(excess / 2)) if excess > 0 else 0


def _breaks(load: EngineLoad) -> bool:
    """Whether it misses an objective that it would keep with less to do: only then do more engines
    help."""
    if not (load.num_running or load.num_waiting or load.prefill_tokens):
        return False
    limit_s = load.ttft_s
    lone_s = MIDDLING_TOKENS / load.prefill_rate if load.prefill_rate else 0.0
    if lone_s > limit_s:  # as no engine keeps it, one that keeps up does as well as it can
        limit_s = WORST * lone_s
    late = load.ttft_s > 0.0 and load.promised_s > limit_s
    return late or load.slack_share < 0.0
