"""Outstanding steps, and when the oldest must be answered: past that, a stage is stuck."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from actors.scheduling.plan import StepPlan

# Nothing measured yet: the first step may include compilation and page faults.
_FIRST_STEP_S = 60.0
_FIRST_STEP_TOKEN_S = 0.05


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A step handed to the pipeline and not yet answered."""

    plan: StepPlan
    num_tokens: int  # of the plan, which counts them anew each time it is asked
    submitted_s: float
    predicted_s: float | None


class StepDeadline:
    """Calls `overdue(limit_s)` when the oldest outstanding step takes implausibly long.

    A step may take `factor` times what is predicted, or else what its tokens have taken lately,
    but never less than `floor_s`. A timer that rings early sets itself anew: cheaper than one for
    every step.
    """

    def __init__(self, floor_s: float, factor: float, overdue: Callable[[float], None]) -> None:
        self._floor_s = floor_s
        self._factor = factor
        self._overdue = overdue
        self._steps: deque[Outstanding] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_s = 0.0  # when the timer does
        self._limit_s = 0.0  # of the oldest step, from when it became the oldest
        self._due_s = 0.0
        self._slowest_token_s = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def submitted(self, plan: StepPlan, now_s: float, predicted_s: float | None) -> None:
        self._steps.append(Outstanding(plan, plan.num_tokens, now_s, predicted_s))
        if len(self._steps) == 1:
            self._expect(now_s)

    def answered(self, now_s: float) -> Outstanding:
        """The oldest step has its answer; the clock of the next one starts."""
        step = self._steps.popleft()
        if self._steps:
            self._expect(now_s)
        return step

    def observe(self, step: Outstanding, seconds: float) -> None:
        """Learn from a step that went well: the slowest token of late, forgotten slowly."""
        self._slowest_token_s = max(0.99 * self._slowest_token_s, seconds / max(1, step.num_tokens))

    def clear(self) -> None:
        """Whatever is outstanding will not be answered."""
        self._steps.clear()

    def _expect(self, now_s: float) -> None:
        """The oldest step has from now on until its limit."""
        self._limit_s = self._limit_of(self._steps[0])
        self._due_s = now_s + self._limit_s
        if self._timer is None:
            self._ring_at_due(now_s)
        elif self._due_s < self._rings_s:
            self._timer.cancel()
            self._ring_at_due(now_s)

    def _ring_at_due(self, now_s: float) -> None:
        self._rings_s = self._due_s
        self._timer = asyncio.get_running_loop().call_later(self._due_s - now_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        if not self._steps:
            return
        if now_s < self._due_s:
            self._ring_at_due(now_s)
        else:
            self._overdue(self._limit_s)

    def _limit_of(self, step: Outstanding) -> float:
        estimate_s = step.predicted_s or step.num_tokens * self._slowest_token_s
        limit_s = max(self._floor_s, estimate_s * self._factor)
        if self._slowest_token_s == 0.0:
            limit_s = max(limit_s, _FIRST_STEP_S + _FIRST_STEP_TOKEN_S * step.num_tokens)
        return limit_s
