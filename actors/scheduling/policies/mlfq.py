"""Preemptive skip-join multi-level feedback queue (FastServe, section 4.1).

Each step serves the first `max_batch` requests in order, running or waiting; the order demotes
requests that have used up the quantum of their level. A waiting request of a better level replaces
a running one. The KV of requests that are not served stays until an earlier one needs the memory.
"""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.policies.sarathi import fill_with_chunks
from actors.scheduling.registry import within
from actors.scheduling.step import StepBuilder


class FeedbackQueue:
    order = "mlfq"
    reserve = False

    def __init__(self, config: SchedulerConfig, max_batch: int | None = None) -> None:
        within(1, 1e9, max_batch=max_batch)
        self.max_batch = max_batch

    def plan(self, step: StepBuilder) -> None:
        step.rerank()
        if step.order_preempts:
            self._make_way(step)
        prefilling = set(step.prefilling)
        served = sorted([*step.decoding, *prefilling], key=lambda state: state.order_key)
        most = self.max_batch or max(step.config.max_requests, len(served))
        del served[most:]
        before = {state: state.num_computed_tokens for state in served}
        step.decode([state for state in served if state not in prefilling])
        left = step.tokens_left()
        for state in served:
            if state in prefilling:
                left -= step.chunk(state, left)
        if len(served) < most:
            fill_with_chunks(step, left)
        step.charge({s: max(0, s.num_computed_tokens - n) for s, n in before.items()})

    @staticmethod
    def _make_way(step: StepBuilder) -> None:
        """With every slot taken, a waiting request of a better level replaces the last running."""
        head, num_running = step.head(), step.num_running
        if head is None or step.num_slots_taken < step.config.max_requests:
            return
        if step.num_slots_taken > num_running:
            return  # the next answer frees a slot
        worst = max([*step.decoding, *step.prefilling], key=lambda state: state.order_key)
        if head.order_key[0] < worst.order_key[0]:
            step.preempt(worst)
