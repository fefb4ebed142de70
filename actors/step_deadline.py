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
    submitted_s: float
    predicted_s: float | None


class StepDeadline:
    """Calls `overdue(limit_s)` when the oldest outstanding step takes implausibly long.

    A step may take `factor` times what is predicted, or else what its tokens have taken lately,
    but never less than `floor_s`.
    """

    def __init__(self, floor_s: float, factor: float, overdue: Callable[[float], None]) -> None:
        self._floor_s = floor_s
        self._factor = factor
        self._overdue = overdue
        self._steps: deque[Outstanding] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._slowest_token_s = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def submitted(self, plan: StepPlan, now_s: float, predicted_s: float | None) -> None:
        self._steps.append(Outstanding(plan, now_s, predicted_s))
        if self._timer is None:
            self._arm()

    def answered(self) -> Outstanding:
        """The oldest step has its answer; the clock of the next one starts."""
        step = self._steps.popleft()
        self._arm()
        return step

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that went well: the slowest token of late, forgotten slowly."""
        self._slowest_token_s = max(0.99 * self._slowest_token_s, seconds / max(1, num_tokens))

    def clear(self) -> None:
        """Whatever is outstanding will not be answered."""
        self._steps.clear()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._steps:
            limit_s = self._limit_s(self._steps[0])
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(limit_s, self._overdue, limit_s)

    def _limit_s(self, step: Outstanding) -> float:
        num_tokens = step.plan.num_tokens
        estimate_s = step.predicted_s or num_tokens * self._slowest_token_s
        limit_s = max(self._floor_s, estimate_s * self._factor)
        if self._slowest_token_s == 0.0:
            limit_s = max(limit_s, _FIRST_STEP_S + _FIRST_STEP_TOKEN_S * num_tokens)
        return limit_s
