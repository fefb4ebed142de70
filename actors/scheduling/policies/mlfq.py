"""Preemptive skip-join multi-level feedback queue (FastServe, section 4.1).

Each step serves the best `max_batch` requests by level, running or waiting. Who has used up the
quantum of a level is demoted; a waiting request of a better level takes the place of a running
one. KV of the passed-over stays where it is until somebody better needs the memory.
"""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.queue.mlfq import FeedbackLevels
from actors.scheduling.policies.base import fill_with_chunks
from actors.scheduling.state import RequestState, Status
from actors.scheduling.step import StepBuilder


class FeedbackQueue:
    order = "mlfq"
    reserve = False

    def __init__(self, config: SchedulerConfig, max_batch: int | None = None) -> None:
        self.max_batch = max_batch

    def plan(self, step: StepBuilder) -> None:
        residents = step.residents
        levels = residents.order
        if isinstance(levels, FeedbackLevels):
            self._demote(step, levels)
            self._make_way(step)
        prefilling = set(residents.prefilling)
        served = sorted([*residents.decoding, *prefilling], key=lambda s: s.rank)
        most = self.max_batch or max(step.config.max_requests, len(served))
        del served[most:]
        before = {state: state.planned for state in served}
        step.decode([state for state in served if state not in prefilling])
        left = step.tokens_left()
        for state in served:
            if state in prefilling and state.status is Status.RUNNING:
                left -= step.chunk(state, left)
        if len(served) < most:
            fill_with_chunks(step, left)
        for state, planned in before.items():
            state.served += max(0, state.planned - planned)

    def _demote(self, step: StepBuilder, levels: FeedbackLevels) -> None:
        """Who has had its quantum goes one level down; who has starved, to the top."""
        changed = False
        for state in (*step.residents.decoding, *step.residents.prefilling):
            last_s = state.last_token_s
            if state.level and last_s is not None and step.now_s - last_s > levels.promote_s:
                levels.set_level(state, 0)
                changed = True
            elif state.served >= levels.quantum(state.level) and (
                state.level < levels.num_levels - 1
            ):
                levels.set_level(state, state.level + 1)
                changed = True
        if changed:
            step.residents.resort()

    def _make_way(self, step: StepBuilder) -> None:
        """With every place taken, a better waiting request replaces the worst running one."""
        residents = step.residents
        head = step.head()
        if head is None or residents.num_residents + residents.num_leaving < (
            step.config.max_requests
        ):
            return
        worst: RequestState | None = None
        for running in (residents.decoding, residents.prefilling):
            if running and (worst is None or running[-1].rank > worst.rank):
                worst = running[-1]
        if worst is not None and head.level < worst.level and residents.num_leaving == 0:
            step.preempt(worst)
