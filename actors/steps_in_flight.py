"""The steps in the pipeline: when the oldest must be answered, and what each one was."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from actors.scheduling.core import Core
from actors.scheduling.plan import StepPlan, StepResult
from actors.scheduling.state import InFlight
from actors.transport.messages import IterationRecord

# Nothing measured yet: the first step may include compilation and page faults.
_FIRST_STEP_S = 60.0
_FIRST_STEP_TOKEN_S = 0.05


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step handed to the pipeline and not yet answered."""

    plan: StepPlan
    submitted_s: float
    predicted_s: float | None


class StepDeadline:
    """Calls `overdue(limit_s)` when the oldest outstanding step takes implausibly long.

    A step may take `factor` times what is predicted, or else what its tokens have taken lately,
    but never less than `floor_s`: looking that often is never late, and the steps between two looks
    cost no timers.
    """

    def __init__(self, floor_s: float, factor: float, overdue: Callable[[float], None]) -> None:
        self._floor_s = floor_s
        self._factor = factor
        self._overdue = overdue
        self._steps: deque[StepInFlight] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = 0.0  # when the oldest step became that
        self._slowest_token_s = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def submitted(self, plan: StepPlan, now_s: float, predicted_s: float | None) -> None:
        self._steps.append(StepInFlight(plan, now_s, predicted_s))
        if len(self._steps) == 1:
            self._since_s = now_s
            if self._timer is None:
                self._look_after(self._floor_s)

    def answered(self, now_s: float) -> StepInFlight:
        """The oldest step has its answer; the clock of the next one starts."""
        self._since_s = now_s
        return self._steps.popleft()

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that went well: the slowest token of late, forgotten slowly."""
        self._slowest_token_s = max(0.99 * self._slowest_token_s, seconds / max(1, num_tokens))

    def clear(self) -> None:
        """What is outstanding will not be answered."""
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

    def _limit_of(self, step: StepInFlight) -> float:
        num_tokens = step.plan.num_tokens
        estimate_s = step.predicted_s or num_tokens * self._slowest_token_s
        limit_s = max(self._floor_s, estimate_s * self._factor)
        if self._slowest_token_s == 0.0:
            limit_s = max(limit_s, _FIRST_STEP_S + _FIRST_STEP_TOKEN_S * num_tokens)
        return limit_s


_RECORDS_EVERY_S = 0.1  # how long records wait for others, while there are steps


class IterationRecords:
    """What each iteration was, gathered until it is time to send it.

    Records travel some at a time because a step leaves cold caches, and handling one record an
    iteration would fetch all the code for it anew.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._records: list[IterationRecord] = []
        self._sent_s = 0.0

    def note(
        self,
        step: StepInFlight,
        planned: InFlight,
        done_s: float,
        answer: StepResult,
        recoveries: int,
    ) -> None:
        """To be called once the outputs are on their way: a record is in no hurry."""
        num_decodes, requests = planned.num_decode_tokens, self._core.requests
        self._records.append(
            IterationRecord(
                planned.plan.step_id,
                step.submitted_s,
                done_s,
                step.predicted_s,
                num_decodes,
                planned.num_tokens - num_decodes,
                len(planned.plan.slices),
                answer.stage_times_s,
                len(requests.decoding),
                len(requests.prefilling),
                requests.waiting.num_requests,
                requests.num_free_blocks,
                requests.num_preemptions,
                recoveries,
                self._core.step.token_budget,
            )
        )

    def take_due(self, now_s: float) -> list[IterationRecord]:
        """What has been gathered: every so often, and at once before the engine rests."""
        if self._core.in_flight and now_s - self._sent_s < _RECORDS_EVERY_S:
            return []
        records, self._records = self._records, []
        self._sent_s = now_s
        return records
