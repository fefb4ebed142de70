"""Engines that a cost model describes."""

from __future__ import annotations

from dataclasses import replace

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel


def modeled(model: CostModel, **changes: object) -> SchedulerConfig:
    """The settings of a core for it. Plans are made when a step ends, and a prompt is in one step
    at a time; `changes` are fields of the settings."""
    base = SchedulerConfig(
        num_blocks=model.kv_tokens // 16, block_size=16, prefix_cache=False, swap="never",
        max_requests=128, max_model_len=model.max_model_len, max_step_tokens=16384,
        num_stages=model.num_stages, lookahead=False, overlap_chunks=False, budget="fixed",
        cost_model=model.to_dict(),
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]
