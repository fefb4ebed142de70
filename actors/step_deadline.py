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
    but never less than `floor_s`: whoever looks that often is never late, and the steps between
    two looks cost no timers.
    """

    def __init__(self, floor_s: float, factor: float, overdue: Callable[[float], None]) -> None:
        self._floor_s = floor_s
        self._factor = factor
        self._overdue = overdue
        self._steps: deque[Outstanding] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = 0.0  # when the oldest step became that
        self._slowest_token_s = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def submitted(self, plan: StepPlan, now_s: float, predicted_s: float | None) -> None:
        self._steps.append(Outstanding(plan, plan.num_tokens, now_s, predicted_s))
        if len(self._steps) == 1:
            self._since_s = now_s
            if self._timer is None:
                self._look_after(self._floor_s)

    def answered(self, now_s: float) -> Outstanding:
        """The oldest step has its answer; the clock of the next one starts."""
        self._since_s = now_s
        return self._steps.popleft()

    def observe(self, step: Outstanding, seconds: float) -> None:
        """Learn from a step that went well: the slowest token of late, forgotten slowly."""
        self._slowest_token_s = max(0.99 * self._slowest_token_s, seconds / max(1, step.num_tokens))

    def clear(self) -> None:
        """Whatever is outstanding will not be answered."""
        self._steps.clear()

    def _look_after(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._steps:
            return
        limit_s = self._limit_of(self._steps[0])
        left_s = self._since_s + limit_s - time.monotonic()
        if left_s > 0:
            self._look_after(min(left_s, self._floor_s))
        else:
            self._overdue(limit_s)

    def _limit_of(self, step: Outstanding) -> float:
        estimate_s = step.predicted_s or step.num_tokens * self._slowest_token_s
        limit_s = max(self._floor_s, estimate_s * self._factor)
        if self._slowest_token_s == 0.0:
            limit_s = max(limit_s, _FIRST_STEP_S + _FIRST_STEP_TOKEN_S * step.num_tokens)
        return limit_s
