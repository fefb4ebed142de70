"""Ray Serve's default: a target number of requests per engine, whatever their cost."""

from __future__ import annotations

import math
from collections.abc import Mapping

from actors.fleet.scaling.base import Bounds, EngineLoad, Scaling, serving
from actors.scheduling.registry import within


class QueueLength(Scaling):
    """`target` requests per engine, over the mean of the last `look_back_s`. A change is made once
    it has been wanted for the delay of its direction. The defaults are those of Serve's
    `AutoscalingConfig`, except for the target, which is 2 there.
    """

    def __init__(
        self,
        target: float = 16.0,
        upscale_delay_s: float = 30.0,
        downscale_delay_s: float = 600.0,
        look_back_s: float = 30.0,
    ) -> None:
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
        self._live: dict[float, float] = {}  # number of requests, by time of the call
        self._change: tuple[bool, float] | None = None  # (upward, since when it is wanted)

    def wanted(
        self,
        loads: Mapping[str, EngineLoad],
        num_starting: int,
        num_queued: int,
        now_s: float,
        bounds: Bounds,
    ) -> int:
        have = len(serving(loads)) + num_starting
        live = num_queued + sum([load.num_running + load.num_waiting for load in loads.values()])
        self._live = {at_s: n for at_s, n in self._live.items() if now_s - at_s < self._look_back_s}
        self._live[now_s] = live
        mean = sum(self._live.values()) / len(self._live)
        desired = bounds.clamp(math.ceil(mean / self._target - 1e-9))
        if have == 0 or desired == have:
            self._change = None
            return desired or bounds.clamp(1 if live else 0)
        upward = desired > have
        if self._change is None or self._change[0] != upward:
            self._change = upward, now_s
        if now_s - self._change[1] < (self._up_s if upward else self._down_s) - 1e-6:
            return bounds.clamp(have)
        self._change = None
        return desired
