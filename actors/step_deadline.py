"""Outstanding steps, and when the oldest must be answered: past that, a stage is stuck."""

from __future__ import annotations

import asyncio
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
        self._limit_s = 0.0  # of the oldest step, from when it became the oldest
        self._due_s = 0.0  # on the loop's clock
        self._slowest_token_s = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def submitted(self, plan: StepPlan, now_s: float, predicted_s: float | None) -> None:
        self._steps.append(Outstanding(plan, plan.num_tokens, now_s, predicted_s))
        if len(self._steps) == 1:
            self._expect()

    def answered(self) -> Outstanding:
        """The oldest step has its answer; the clock of the next one starts."""
        step = self._steps.popleft()
        self._expect()
        return step

    def observe(self, step: Outstanding, seconds: float) -> None:
        """Learn from a step that went well: the slowest token of late, forgotten slowly."""
        self._slowest_token_s = max(0.99 * self._slowest_token_s, seconds / max(1, step.num_tokens))

    def clear(self) -> None:
        """Whatever is outstanding will not be answered."""
        self._steps.clear()

    def _expect(self) -> None:
        """The oldest step, if there is one, has from now on until its limit."""
        if not self._steps:
            return
        loop = asyncio.get_running_loop()
        self._limit_s = self._limit_of(self._steps[0])
        self._due_s = loop.time() + self._limit_s
        if self._timer is not None:
            if self._timer.when() <= self._due_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._steps:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._due_s:
            self._timer = loop.call_at(self._due_s, self._look)
        else:
            self._overdue(self._limit_s)

    def _limit_of(self, step: Outstanding) -> float:
        estimate_s = step.predicted_s or step.num_tokens * self._slowest_token_s
        limit_s = max(self._floor_s, estimate_s * self._factor)
        if self._slowest_token_s == 0.0:
            limit_s = max(limit_s, _FIRST_STEP_S + _FIRST_STEP_TOKEN_S * step.num_tokens)
        return limit_s
