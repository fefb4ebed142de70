"""Refusals before a request is queued."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import MayReturn, Refuse
from actors.scheduling.interfaces import (
    Admission,
    EngineView,
    RequestView,
    StepTimePredictor,
)
from actors.scheduling.plan import StepShape
from actors.scheduling.request import Request


class QueueLimits:
    """Checks limits of the engine, the queue and the tenant, then asks the admission."""

    def __init__(
        self, config: SchedulerConfig, admission: Admission, cost: StepTimePredictor | None = None
    ) -> None:
        self.config = config
        self.admission = admission
        self.cost = cost

    def on_submit(self, request: Request, engine: EngineView, joins: bool = False) -> Refuse | None:
        """The refusal of this request, or None. Called once per request.

        One that was accepted before (its engine was lost, or it has moved) is not judged anew:
        a refusal would end a stream that its client is reading. Likewise one that joins a group
        that is here: it was accepted with its first member, which computes the prompt of all.
        """
        refusal = self.impossible(request, engine)
        if refusal is not None or request.was_accepted or joins:
            return refusal
        return self.overload(request, engine) or self.admission.on_submit(
            request, engine.found_by(request.priority, request.tenant)
        )

    def turned_away(self, refused: Sequence[MayReturn], now_s: float) -> None:
        self.admission.turned_away(refused, now_s)

    def impossible(self, request: Request, engine: EngineView) -> Refuse | None:
        """Refuse a request for which a retry would not help."""
        config, name = self.config, request.request_id
        num_prompt, sampling = len(request.prompt), request.sampling
        if engine.knows(name):
            return Refuse(name, f"request {name} is already here", "request_id")
        if num_prompt == 0:
            return Refuse(name, "the prompt is empty", "prompt")
        if request.pooling is not None:
            if num_prompt > config.max_model_len:
                return Refuse(
                    name,
                    f"the prompt has {num_prompt} tokens, the context holds {config.max_model_len}",
                    "prompt",
                )
            longest = num_prompt
        else:
            if sampling.max_tokens < 1:
                return Refuse(name, "max_tokens must be at least 1", "max_tokens")
            if num_prompt >= config.max_model_len:
                return Refuse(
                    name,
                    f"the prompt has {num_prompt} tokens and the context holds "
                    f"{config.max_model_len}: no room for an output token",
                    "prompt",
                )
            longest = min(num_prompt + sampling.max_tokens, config.max_model_len) - 1
        capacity = config.num_blocks * config.block_size
        if longest > capacity:
            param = "prompt" if num_prompt > capacity else "max_tokens"
            return Refuse(
                name, f"{longest} tokens of KV are needed, the cache holds {capacity}", param
            )
        # What an engine had accepted may have become later than its objective: it goes on.
        return None if request.was_accepted else self._impossible_objective(request)

    def _impossible_objective(self, request: Request) -> Refuse | None:
        """Refuse an objective that even an idle engine could not keep."""
        name, objective, num_prompt = request.request_id, request.objective, len(request.prompt)
        least_s = self.least_tbt_s(num_prompt)
        if objective.tbt_s is not None and objective.tbt_s < least_s:
            return Refuse(
                name,
                f"{1000 * objective.tbt_s:g} ms between tokens is not achievable: "
                f"at least {1000 * least_s:.3g} ms",
                "slo.tbt_ms",
            )
        if objective.ttft_s is None or self.cost is None:
            return None
        # With a cached prefix, as little as one block has to be computed.
        most = self.config.block_size if self.config.prefix_cache else self.config.max_step_tokens
        chunk = min(num_prompt, most)
        least_s = self._usual_latency_s(StepShape(prefills=((num_prompt - chunk, chunk),)))
        if objective.ttft_s < least_s:
            return Refuse(
                name,
                f"a first token within {1000 * objective.ttft_s:g} ms is not achievable: "
                f"this prompt takes at least {1000 * least_s:.3g} ms",
                "slo.ttft_ms",
            )
        return None

    def least_tbt_s(self, num_prompt_tokens: int) -> float:
        """The tightest TBT objective possible after such a prompt."""
        shape = StepShape(1, num_prompt_tokens + 1)
        return max(self.config.min_tbt_s or 0.0, self._usual_latency_s(shape))

    def _usual_latency_s(self, shape: StepShape) -> float:
        """Without what the newest steps took longer: a refusal that names no time to retry after
        must not hang on a moment. 0.0 without a cost model."""
        if self.cost is None:
            return 0.0
        slowness = self.cost.slowness if isinstance(self.cost, OnlineCostModel) else 0.0
        return self.cost.latency_s(shape) * math.exp(-slowness)

    def overload(self, request: Request, engine: EngineView) -> Refuse | None:
        """Refuse because of a full queue; a retry may succeed. What waits in the background fills
        no live request's queue, but counts for its tenant."""
        config, name = self.config, request.request_id
        engine = engine.found_by(request.priority)
        limit = config.max_queued_requests
        if limit is not None and engine.num_waiting >= limit:
            message = f"the queue is full (scheduling.max_queued_requests: {limit})"
            return Refuse(name, message, None, self._retry_s(engine))
        limit = config.max_queued_tokens
        num_tokens = len(request.prompt) + len(request.output)
        # An empty queue takes any prompt: otherwise a long one could never be served.
        if limit is not None and 0 < _to_compute(engine) > limit - num_tokens:
            message = f"the queue has no room for this (scheduling.max_queued_tokens: {limit})"
            return Refuse(name, message, None, self._retry_s(engine))
        limit = config.max_queued_per_tenant
        if limit is not None and engine.num_waiting_of(request.tenant) >= limit:
            message = f"this tenant's queue is full (scheduling.max_queued_per_tenant: {limit})"
            return Refuse(name, message, None, self._retry_s(engine))
        return None

    def _retry_s(self, engine: EngineView) -> float:
        """Time to compute half of the waiting tokens at the present rate."""
        if engine.tokens_per_s <= 0:
            return 1.0
        return min(60.0, max(0.1, _to_compute(engine) / engine.tokens_per_s / 2))


def _to_compute(engine: EngineView) -> int:
    return engine.num_waiting_tokens - engine.num_shared_tokens


@dataclass(frozen=True, slots=True)
class AcceptAll:
    """Accepts every request; only memory and slots decide when it starts."""

    @classmethod
    def build(cls, config: SchedulerConfig, cost: StepTimePredictor | None) -> AcceptAll:
        return cls()

    def on_submit(self, request: Request, engine: EngineView) -> Refuse | None:
        return None

    def turned_away(self, refused: Sequence[MayReturn], now_s: float) -> None:
        """It refuses none."""

    def may_start(self, request: RequestView, engine: EngineView) -> bool:
        return True
