"""Chunked prompts without hybrid batches (the Sarathi-Serve ablation, table 4).

Chunks and decodes take turns: a step holds one kind or the other.
"""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.policies.base import fill_with_chunks
from actors.scheduling.step import StepBuilder


class ChunkedOnly:
    order = "fcfs"
    reserve = False

    def __init__(self, config: SchedulerConfig) -> None:
        self._prefill_turn = True

    def plan(self, step: StepBuilder) -> None:
        for prefill in (self._prefill_turn, not self._prefill_turn):
            if prefill:
                fill_with_chunks(step, step.tokens_left())
            else:
                step.decode_all()
            if not step.empty:
                self._prefill_turn = not prefill
                return
