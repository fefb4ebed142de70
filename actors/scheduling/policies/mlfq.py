"""Preemptive skip-join multi-level feedback queue (FastServe, section 4.1).

Each step serves the first `max_batch` requests in order, running or waiting; the order demotes
requests that have used up the quantum of their level. A waiting request of a better level replaces
a running one. The KV of requests that are not served stays until an earlier one needs the memory.
"""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.policies.sarathi import fill_with_chunks
from actors.scheduling.registry import within
from actors.scheduling.state import RequestState
from actors.scheduling.step import StepBuilder


class FeedbackQueue:
    order = "mlfq"
    reserve = False

    def __init__(self, config: SchedulerConfig, max_batch: int | None = None) -> None:
        within(1, 1e9, max_batch=max_batch)
        self.max_batch = max_batch

    def plan(self, step: StepBuilder) -> None:
        step.rerank()
        head = step.head() if step.order_preempts else None
        if head is not None:
            self._make_way(step, head)
        prefilling = set(step.prefilling)
        served = sorted([*step.decoding, *prefilling], key=lambda state: state.order_key)
        most = self.max_batch or max(step.config.max_requests, len(served))
        del served[most:]
        left_out = []  # the last of the batch, for the head of a better level
        if (
            head is not None
            and len(served) == most
            and _is_of_better_level(head, served[-1])
            and not (step.is_place_coming or step.lacks_place(head))
        ):
            left_out.append(served.pop())
        before = {state: state.num_computed_tokens for state in (*served, *left_out)}
        step.decode([state for state in served if state not in prefilling])
        left = step.tokens_left()
        for state in served:
            if state in prefilling:
                left -= step.chunk(state, left)
        if self.max_batch is None:
            fill_with_chunks(step, left)
        else:
            num_started = _start(step, left, most - len(served))
            for state in () if num_started else left_out:  # by budget or admission the head waits
                if state in prefilling:
                    step.chunk(state, left)
                elif step.room > 0:
                    step.decode((state,))
        step.charge({s: max(0, s.num_computed_tokens - n) for s, n in before.items()})

    @staticmethod
    def _make_way(step: StepBuilder, head: RequestState) -> None:
        """A waiting request of a better level, which lacks a slot or memory, replaces the last
        running, if those of worse levels have enough."""
        if step.is_place_coming:
            return
        running = (*step.decoding, *step.prefilling)
        worse = [state for state in running if _is_of_better_level(head, state)]
        if worse and step.lacks_place(head) and not step.lacks_place(head, without=worse):
            step.preempt(max(worse, key=lambda state: state.order_key))


def _is_of_better_level(state: RequestState, other: RequestState) -> bool:
    return state.order_key[0] < other.order_key[0]


def _start(step: StepBuilder, left: int, most: int) -> int:
    """Start up to `most` requests with `left` tokens; returns how many."""
    num_started = 0
    while left > 0 and num_started < most and (head := step.head()) is not None:
        granted = step.start(head, min(left, step.config.max_chunk or left))
        if granted == 0:
            break
        left -= granted
        num_started += 1
    return num_started
