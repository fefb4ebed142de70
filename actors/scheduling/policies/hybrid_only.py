"""Hybrid batches of unchunked prompts (the Sarathi-Serve ablation, table 4).

All decodes run beside whole prompts: Orca's batching on paged KV. A long prompt makes every
decode of its step as slow as itself.
"""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.policies.base import fill_with_whole_prompts
from actors.scheduling.step import StepBuilder


class HybridOnly:
    order = "fcfs"
    reserve = False

    def __init__(self, config: SchedulerConfig, max_batched_tokens: int | None = None) -> None:
        self.max_batched_tokens = max_batched_tokens or config.max_step_tokens

    def plan(self, step: StepBuilder) -> None:
        step.decode_all()
        fill_with_whole_prompts(step, self.max_batched_tokens - step.num_tokens)
