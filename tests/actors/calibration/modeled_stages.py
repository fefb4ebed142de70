"""Stages whose every step takes what a known cost model says."""

from __future__ import annotations

import random

from actors.calibration.measure import EngineLimits
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.plan import RequestStart, StepPlan, StepResult

LIMITS = EngineLimits(
    max_step_tokens=2048, max_requests=32, max_model_len=4096, kv_tokens=32 * 4096
)
TRUTH = CostModel(
    "truth",
    tokens_s=((1, 0.004), (32, 0.005), (256, 0.03), (2048, 0.24)),
    per_request_s=2e-5,
    decode_kv_s=4e-8,
    prefill_kv_s=3e-8,
    prefill_pair_s=2e-9,
)


class Stages:
    """Keeps the contract that real stages rely on; time passes by the truth, and some noise."""

    def __init__(
        self,
        truth: CostModel = TRUTH,
        noise: float = 0.0,
        num_stages: int = 1,
        disturbed_until_s: float = 0.0,
        disturbance: float = 1.5,
    ) -> None:
        self.truth, self.noise, self.num_stages = truth, noise, num_stages
        self.disturbed_until_s = disturbed_until_s
        self.disturbance = disturbance
        self.now_s = 0.0
        self.known: dict[int, RequestStart] = {}
        self.num_steps = 0
        self._random = random.Random(3)

    def clock(self) -> float:
        return self.now_s

    async def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step_id == self.num_steps
        self.num_steps += 1
        for request_id in plan.released:
            del self.known[request_id]
        self.known |= {start.request_id: start for start in plan.started}
        assert len(self.known) <= LIMITS.max_requests
        blocks = [block for start in self.known.values() for block in start.block_ids]
        assert len(blocks) == len(set(blocks))
        assert max(blocks, default=0) < LIMITS.kv_tokens // LIMITS.block_size
        assert plan.num_tokens <= LIMITS.max_step_tokens
        for part in plan.named_slices:
            start = self.known[part.request_id]
            end = part.start + part.num_tokens
            assert 0 <= part.start < end <= len(start.tokens) < LIMITS.max_model_len
            assert end < len(start.block_ids) * LIMITS.block_size
        times = []
        for _ in range(self.num_stages):
            begin_s = self.now_s
            self.now_s += self._seconds(plan)
            times.append((begin_s, self.now_s))
        return StepResult(plan.step_id, (), stage_times_s=tuple(times))

    def _seconds(self, plan: StepPlan) -> float:
        if not plan.slices:
            return 1e-4
        mix = Mix.of(plan.slices, self.truth.attention_window)
        disturbed = 2.0 if self._random.random() < 0.1 else 1.0
        beside = self.disturbance if self.now_s < self.disturbed_until_s else 1.0
        return (
            self.truth.stage_s(mix) * beside * (1 + self.noise * self._random.random() * disturbed)
        )
