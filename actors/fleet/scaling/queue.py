"""Ray Serve's default: so many requests an engine, whatever they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping

from actors.fleet.scaling.base import Bounds, EngineLoad, Scaling, ScalingState, serving
from actors.scheduling.registry import within


class QueueLength(Scaling):
    """Aims at `target` requests an engine, on the mean of the last `look_back_s`; a change waits
    until it has been wanted for so long. Defaults are those of Serve's `AutoscalingConfig`, but for
    the target, which is 2 there."""

    def __init__(
        self,
        bounds: Bounds,
        target: float = 16.0,
        upscale_delay_s: float = 30.0,
        downscale_delay_s: float = 600.0,
        look_back_s: float = 30.0,
    ) -> None:
        super().__init__(bounds)
        within(0.001, math.inf, target=target)
        within(
            0.0,
            math.inf,
            upscale_delay_s=upscale_delay_s,
            downscale_delay_s=downscale_delay_s,
            look_back_s=look_back_s,
        )
        self._target = target
        self._up_s = upscale_delay_s
        self._down_s = downscale_delay_s
        self._look_back_s = look_back_s

    def wanted(
        self,
        loads: Mapping[str, EngineLoad],
        num_starting: int,
        num_queued: int,
        now_s: float,
        state: ScalingState,
    ) -> tuple[int, ScalingState]:
        have = len(serving(loads)) + num_starting
        live = num_queued + sum([load.num_running + load.num_waiting for load in loads.values()])
        mean, kept = self._mean(live, now_s, state)
        desired = self.bounds.clamp(math.ceil(mean / self._target - 1e-9))
        if have == 0 or desired == have:
            return self.bounds.clamp(desired or (1 if live else 0)), kept
        # Upward since a time, or downward since minus that time; another direction starts anew.
        sign = 1.0 if desired > have else -1.0
        since_s = state.get("since_s", now_s) if state.get("direction") == sign else now_s
        if now_s - since_s >= (self._up_s if desired > have else self._down_s) - 1e-6:
            return desired, kept
        return self.bounds.clamp(have), {**kept, "direction": sign, "since_s": since_s}

    def _mean(self, live: float, now_s: float, state: ScalingState) -> tuple[float, ScalingState]:
        """The mean over the look-back, and the samples to remember: "at <time>" -> requests."""
        kept = {
            key: value
            for key, value in state.items()
            if key.startswith("at ") and now_s - float(key[3:]) < self._look_back_s
        }
        kept[f"at {now_s!r}"] = live
        return sum(kept.values()) / len(kept), kept
