"""Notices that a step takes implausibly long, so that a stage that hangs is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actors.scheduling.core import Core
from actors.scheduling.state import InFlight
from actors.transport.running_time import LOOKS, RunningTime

# Limits before any measurement: the first step may include compilation and page faults.
_FIRST_STEP_S = 60.0
_FIRST_STEP_TOKEN_S = 0.05


class StepDeadline:
    """Calls `lose(reason)` when the oldest step in flight takes implausibly long.

    A step may take `factor` times its prediction (without one, the recent time of as many tokens),
    but at least `floor_s`. Looking a few times per `floor_s` is therefore early enough and needs no
    timer per step. Time in which this process stood still is no time of a step (`RunningTime`).

    timer: None unless it watches. slowest_token_s: of recent successful steps, with slow decay. The
    loop looks at the one and keeps the other, once a step.
    """

    def __init__(
        self,
        core: Core,
        floor_s: float,
        factor: float,
        lose: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._clock = clock
        self._floor_s = floor_s
        self._factor = factor
        self._lose = lose
        self._period_s = floor_s / LOOKS
        self._ran = RunningTime()
        self.timer: asyncio.TimerHandle | None = None
        self.slowest_token_s = 0.0

    def watch(self) -> None:
        """Begin to watch, because a step is in flight."""
        self.timer = asyncio.get_running_loop().call_later(self._period_s, self._check)

    @property
    def is_half_over(self) -> bool:
        """Whether the oldest step in flight has taken half of what is the least limit."""
        return bool(self._core.in_flight) and self._look() >= self._floor_s / 2

    def _look(self) -> float:
        """Seconds of the oldest step in flight: from when the step before it is answered."""
        since_s = max(self._core.in_flight[0].planned_at_s, self._core.last_answer_s)
        return self._ran.since(since_s, self._clock(), self._period_s)

    def _check(self) -> None:
        self.timer = None
        if not self._core.in_flight:
            return
        limit_s = self._limit_of(self._core.in_flight[0])
        left_s = limit_s - self._look()
        if left_s > 0:
            wait_s = min(left_s, self._period_s)
            self.timer = asyncio.get_running_loop().call_later(wait_s, self._check)
        else:
            self._lose(f"no answer within {limit_s:.1f} s")

    def _limit_of(self, step: InFlight) -> float:
        estimate_s = step.predicted_s or step.num_tokens * self.slowest_token_s
        limit_s = max(self._floor_s, estimate_s * self._factor)
        if self.slowest_token_s == 0.0:
            limit_s = max(limit_s, _FIRST_STEP_S + _FIRST_STEP_TOKEN_S * step.num_tokens)
        return limit_s
