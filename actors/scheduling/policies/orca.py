"""Iteration-level hybrid batching (Orca, OSDI '22; Sarathi-Serve, algorithm 2).

All decodes run beside whole prompts. KV for a request's maximum length is reserved before it
starts, so nothing is ever preempted and batches stay small (`max_batch`, 8 to 16 in the paper).
"""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.policies.base import fill_with_whole_prompts
from actors.scheduling.step import StepBuilder


class Orca:
    order = "fcfs"
    reserve = True

    def __init__(self, config: SchedulerConfig, max_batch: int | None = None) -> None:
        self.max_batch = max_batch or config.max_requests

    def plan(self, step: StepBuilder) -> None:
        step.decode_all()
        fill_with_whole_prompts(step, step.room, max_residents=self.max_batch)
