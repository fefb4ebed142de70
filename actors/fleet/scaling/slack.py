"""Scaling on slack: as many engines as keep the promises, before they break."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from actors.fleet.scaling.base import Bounds, EngineLoad, Scaling, ScalingState, serving
from actors.scheduling.registry import within

SHORTEST_S = 0.5  # between two looks at an engine: what comes in less says little of its rate

MARGIN = 1.1  # on work, before an engine is given up: traffic that wavers shall not move engines
MEMORY_S = 4 * 3600.0  # time constant of forgetting that promises broke
CAUTION = 0.9  # of the work per engine at which they did
LEAST_SHARE = 0.25  # of the target: one mishap does not multiply the fleet


class SlackScaling(Scaling):
    """Work in units of engines: what prompts need of the prefill rate, and streams of the steps.

    Both grow in proportion to traffic, where waiting times explode only once it is too late, and
    both are measured against the objectives: an engine's rate is the one that keeps them. So

        engines = (work now + its trend over `ahead_s`) / `target`

    beside two guards: where promises are already broken (a prompt would not be promised its first
    token, or a stream its pace), by the share of engines where they are; and where places (slots,
    KV memory) run out, by how far. Work per engine at which promises broke is remembered, and for
    some hours engines are not filled as far again: no model of an engine is exact.

    target: share of an engine's time to be used, at most.
    ahead_s: how long an engine takes to start: the trend is followed so far.
    smoothing_s: time constant of the mean that work is judged by.
    calm_s: engines are given up once so long fewer would have done, with `MARGIN` to spare.
    idle_s: with bounds that allow none, the last engine ends after so long without any request.
    """

    def __init__(
        self,
        bounds: Bounds,
        target: float = 0.5,
        ahead_s: float = 60.0,
        smoothing_s: float = 30.0,
        calm_s: float = 120.0,
        idle_s: float = 300.0,
    ) -> None:
        super().__init__(bounds)
        within(0.05, 1.0, target=target)
        within(0.0, math.inf, ahead_s=ahead_s, calm_s=calm_s, idle_s=idle_s)
        within(0.001, math.inf, smoothing_s=smoothing_s)
        self._target = target
        self._ahead_s = ahead_s
        self._smoothing_s = smoothing_s
        self._calm_s = calm_s
        self._idle_s = idle_s

    def wanted(
        self,
        loads: Mapping[str, EngineLoad],
        num_starting: int,
        num_queued: int,
        now_s: float,
        state: ScalingState,
    ) -> tuple[int, ScalingState]:
        here = serving(loads)
        have = len(here) + num_starting
        kept: dict[str, float] = {}
        arrived = self._arrived(loads, state, kept)
        demand = self._demand(arrived, loads, now_s, state, kept)
        broken = self._broken(here, have)
        target = self._filled(bool(broken), len(here), now_s, state, kept)
        needed = max(
            math.ceil(demand / target - 1e-9),
            broken,
            math.ceil(sum([load.used_places for load in here]) - 1e-9),
            1 if num_queued or any(_is_busy(load) for load in loads.values()) else 0,
        )
        needed = self._unless_idle(needed, now_s, loads, num_queued, state, kept)
        if self.bounds.clamp(needed) >= have:
            return self.bounds.clamp(needed), kept
        # Work that has not quite faded from memory keeps no last engine.
        with_margin = math.ceil(MARGIN * demand / target - 1e-9) if needed else 0
        spared = max(needed, min(have, with_margin))
        return self._calm(self.bounds.clamp(spared), have, now_s, state, kept), kept

    # ---- work -------------------------------------------------------------------------

    def _arrived(
        self, loads: Mapping[str, EngineLoad], state: ScalingState, kept: dict[str, float]
    ) -> float:
        """Prefill work that came in per second, in engines; what each engine has had is kept."""
        total = 0.0
        for name, load in loads.items():
            had = load.prefilled_tokens + load.prefill_tokens
            before, at_s = state.get(f"had {name}"), state.get(f"at {name}", load.time_s)
            if before is not None and load.time_s - at_s < SHORTEST_S:
                kept[f"had {name}"], kept[f"at {name}"] = before, at_s
                kept[f"rate {name}"] = rate = state.get(f"rate {name}", 0.0)
            else:
                rate = 0.0
                if before is not None and load.prefill_rate > 0:
                    rate = max(0.0, had - before) / (load.time_s - at_s) / load.prefill_rate
                kept[f"had {name}"], kept[f"at {name}"], kept[f"rate {name}"] = (
                    had,
                    load.time_s,
                    rate,
                )
            total += rate
        return total

    def _demand(
        self,
        arrived: float,
        loads: Mapping[str, EngineLoad],
        now_s: float,
        state: ScalingState,
        kept: dict[str, float],
    ) -> float:
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
        seen = arrived + streams
        passed_s = now_s - state.get("at_s", now_s)
        level, trend = state.get("level", seen), state.get("trend", 0.0)
        if passed_s > 0:
            weight = 1.0 - math.exp(-passed_s / self._smoothing_s)
            expected = level + trend * passed_s
            new = expected + weight * (seen - expected)
            slow = 1.0 - math.exp(-passed_s / (4.0 * self._smoothing_s))
            trend += slow * ((new - level) / passed_s - trend)
            level = new
        kept["at_s"], kept["level"], kept["trend"] = now_s, level, trend
        ahead = max(0.0, trend) * self._ahead_s
        return max(0.0, level) + ahead + backlog_s / max(self._ahead_s, self._smoothing_s)

    def _filled(
        self,
        broken: bool,
        num_engines: int,
        now_s: float,
        state: ScalingState,
        kept: dict[str, float],
    ) -> float:
        """How far engines may be filled: `target`, or less where promises have broken at less.

        Learnt in the moment they break: later a backlog breaks them whatever comes in.
        """
        most = state.get("most", self._target)
        most *= math.exp(max(0.0, now_s - state.get("at_s", now_s)) / MEMORY_S)
        kept["broken"] = float(broken)
        if broken and not state.get("broken") and num_engines:
            most = min(most, CAUTION * kept["level"] / num_engines)
        most = min(self._target, max(most, LEAST_SHARE * self._target))
        kept["most"] = most
        return most

    # ---- guards -----------------------------------------------------------------------

    def _broken(self, here: Sequence[EngineLoad], have: int) -> int:
        """Engines needed as promises break: those there are, and as many more as cannot promise.

        One engine that cannot promise is the router's business while others can; so only what
        exceeds half of them counts.
        """
        broken = sum([_breaks(load) for load in here])
        excess = broken - len(here) / 2
        return have + math.ceil(excess / 2) if excess > 0 else 0

    def _unless_idle(
        self,
        needed: int,
        now_s: float,
        loads: Mapping[str, EngineLoad],
        num_queued: int,
        state: ScalingState,
        kept: dict[str, float],
    ) -> int:
        """Nothing to do for long enough: none is needed; else at least one that is there stays."""
        if num_queued or any(_is_busy(load) for load in loads.values()):
            return max(needed, 1)
        idle_since_s = state.get("idle_since_s", now_s)
        kept["idle_since_s"] = idle_since_s
        if now_s - idle_since_s >= self._idle_s or not loads:
            return 0
        return max(needed, 1)

    def _calm(
        self, needed: int, have: int, now_s: float, state: ScalingState, kept: dict[str, float]
    ) -> int:
        """How many of those there are stay: the most needed at any time while it was calm.

        It is repeated until they have ended: a controller may restart between deciding and acting.
        """
        since_s = state.get("calm_since_s", now_s)
        most = max(needed, int(state.get("calm_most", 0.0)))
        if most >= have:  # not calm: from here on it may be
            since_s, most = now_s, needed
        kept["calm_since_s"], kept["calm_most"] = since_s, most
        return most if now_s - since_s >= self._calm_s else self.bounds.clamp(have)


def _breaks(load: EngineLoad) -> bool:
    late = load.ttft_s > 0.0 and load.promised_s > load.ttft_s
    return late or load.slack_share < 0.0


def _is_busy(load: EngineLoad) -> bool:
    return bool(load.num_running or load.num_waiting)
