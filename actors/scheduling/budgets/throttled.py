"""Token throttling: prefill per micro-batch by waiting work and free memory.

After gLLM (Guo et al., arXiv 2504.14775). A fixed budget fills some micro-batches with prompts and
leaves others without any, so that the stages of a pipeline wait for each other. Instead

    prefill = max(min(waiting / iterations, most * pressure), least)
    pressure = (free - threshold) / (1 - threshold)         free: share of KV blocks not in use

so a short queue is spread over the next `iterations` steps, a long one is prefilled more slowly as
memory fills, and not at all once only `threshold` is free, which is kept for decodes. gLLM also
distributes decodes evenly over the micro-batches: here `micro_batches: uniform`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from actors.scheduling.budgets.adapter_loads import UNPROMISED_LOAD_S
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.interfaces import EngineView, pending_tokens
from actors.scheduling.plan import StepShape
from actors.scheduling.registry import within


@dataclass(frozen=True, slots=True)
class ThrottledBudget:
    """Implements `interfaces.TokenBudget`; the defaults are gLLM's.

    most: tokens of any step, decodes included (the fixed budget it replaces).
    iterations: steps over which waiting prefill tokens are spread.
    least: prefill tokens below which a chunk is not worth a step.
    threshold: share of the KV blocks kept for running requests to grow into.
    """

    learns: ClassVar[bool] = False
    holds_starts: ClassVar[bool] = False

    most: int
    iterations: int = 8
    least: int = 32
    threshold: float = 0.05

    @classmethod
    def build(
        cls, config: SchedulerConfig, cost: OnlineCostModel | None, **options: Any
    ) -> ThrottledBudget:
        return cls(**{"most": config.constant_budget, **options})

    def __post_init__(self) -> None:
        within(1, 1e9, most=self.most, iterations=self.iterations, least=self.least)
        if not 0.0 <= self.threshold < 1.0:
            raise TypeError(f"threshold must lie in [0, 1), not {self.threshold!r}")

    def num_tokens(self, shape: StepShape, engine: EngineView) -> int:
        free = engine.num_free_blocks / engine.num_blocks
        pressure = (free - self.threshold) / (1.0 - self.threshold)
        if pressure <= 0.0 and engine.decoding:
            return shape.num_tokens
        prefill = min(-(-pending_tokens(engine) // self.iterations), int(self.most * pressure))
        return min(shape.num_tokens + max(prefill, self.least), self.most)

    def may_start(self, engine: EngineView) -> bool:
        return True

    def num_background_decodes(self, live: StepShape, most: int, context: int) -> int:
        return max(1, min(most, self.most - live.num_tokens))

    def room_for_background(self, shape: StepShape) -> int:
        return self.most - shape.num_tokens

    def room_for_drafts(self, shape: StepShape) -> int:
        return self.most - shape.num_tokens

    def room_for_adapter_loads_s(self, shape: StepShape) -> float:
        return UNPROMISED_LOAD_S

    def observe(self, shape: StepShape, duration_s: float, drafting_s: float) -> None:
        """Counts tokens, not time."""

    def delivery_took(self, seconds: float) -> None:
        """Likewise."""
