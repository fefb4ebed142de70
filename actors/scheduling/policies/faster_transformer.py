"""Request-level batching (FasterTransformer; Sarathi-Serve, algorithm 1).

A batch is filled with whole prompts, then decoded until its last request is done; only then is
the next one admitted. Decodes never stall, the GPU empties towards the end of each batch.
"""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.policies.base import fill_with_whole_prompts
from actors.scheduling.step import StepBuilder


class FasterTransformer:
    """The batch is open until the first of its decodes; then nobody joins."""

    order = "fcfs"
    reserve = True

    def __init__(self, config: SchedulerConfig, max_batch: int | None = None) -> None:
        self.max_batch = max_batch or config.max_requests
        self._open = True

    def plan(self, step: StepBuilder) -> None:
        residents = step.residents
        if residents.num_residents + residents.num_leaving == 0:
            self._open = True
        most = self.max_batch if self._open else 0
        fill_with_whole_prompts(step, step.room, max_residents=most)
        if step.empty:
            step.decode_all()
            self._open = self._open and step.empty
