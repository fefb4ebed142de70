"""How much work a request is, by the cost model alone: where a search of a capacity starts."""

from __future__ import annotations

from dataclasses import dataclass

from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from app.simulate.run.deployment import divided_memory
from app.simulate.workload.requests import Workload

PREFILL_STEP_TOKENS = 2048  # longer steps make prompts little cheaper


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of an engine's stages that a request takes on average: its prompt, in long steps,
    and its share of full steps of decodes. A rough figure: where to start searching."""

    prompt_s: float
    output_s: float

    @classmethod
    def of(cls, cost: CostModel, drawn: Workload, max_requests: int = 128) -> Work:
        """drawn: requests of typical lengths."""
        prompt = float((drawn.prompt_tokens - drawn.shared_tokens).mean())  # the rest is cached
        output = float(drawn.output_tokens.mean())
        held = float(drawn.prompt_tokens.mean()) + output / 2
        num_requests, kv_tokens = divided_memory(cost, max_requests)
        streams = max(1, int(min(num_requests, kv_tokens / held)) // cost.num_stages)
        chunk = Mix()
        chunk.add(round(prompt / 2), PREFILL_STEP_TOKENS)
        decodes = Mix(streams, round(streams * held))
        return cls(
            cost.stage_s(chunk) * prompt / PREFILL_STEP_TOKENS,
            cost.stage_s(decodes) * output / streams,
        )

    def qps(self, num_prefill: int, num_engines: int) -> float:
        """Capacity of split engines; with num_prefill 0, of colocated ones."""
        if not num_prefill:
            return num_engines / (self.prompt_s + self.output_s)
        return min(num_prefill / self.prompt_s, (num_engines - num_prefill) / self.output_s)

    def divisions(self, num_engines: int) -> list[int]:
        """Numbers of engines for prompts of split ones, the likeliest to hold most first."""
        return sorted(range(1, num_engines), key=lambda n: (-self.qps(n, num_engines), n))
