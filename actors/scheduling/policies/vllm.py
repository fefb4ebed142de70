"""Prefill-first iteration-level batching (vLLM, SOSP '23; Sarathi-Serve, algorithm 2).

While a waiting prompt fits, a step is whole prompts only, up to `max_batched_tokens`; decodes
stall meanwhile. Otherwise the step is all decodes. KV is paged and grows on demand.
"""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.policies.base import fill_with_whole_prompts
from actors.scheduling.step import StepBuilder


class PrefillFirst:
    order = "fcfs"
    reserve = False

    def __init__(self, config: SchedulerConfig, max_batched_tokens: int | None = None) -> None:
        self.max_batched_tokens = max_batched_tokens or config.max_step_tokens

    def plan(self, step: StepBuilder) -> None:
        fill_with_whole_prompts(step, self.max_batched_tokens)
        if step.empty:
            step.decode_all()
