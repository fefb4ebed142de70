"""Orders in which waiting counts: by arrival, by priority, and by expected output.

Ageing needs no timer: when priority grows linearly with waiting time, the order of two requests is
the same at any time.
"""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.queue.waiting import HeapOrder
from actors.scheduling.registry import within
from actors.scheduling.state import RequestState

_MAX_NAMES = 4096  # tenants whose mean is remembered


class FirstComeFirstServed(HeapOrder):
    """By arrival. A priority above 0 counts in the order `priority` only, which an operator
    chooses."""


class PriorityWithAgeing(HeapOrder):
    """One class of priority is worth `ageing_s` seconds of waiting.

    A request of class p overtakes one of class q < p only if it arrives less than
    (p - q) * ageing_s later, which bounds every wait.
    """

    def __init__(self, config: SchedulerConfig, ageing_s: float = 10.0) -> None:
        super().__init__(config)
        within(0, 1e9, ageing_s=ageing_s)
        self.ageing_s = ageing_s

    def value(self, state: RequestState) -> float:
        return state.request.arrival_s - state.request.priority * self.ageing_s


class ShortestOutput(HeapOrder):
    """By expected output length; a second of waiting is worth `ageing_tokens_per_s` tokens.

    The expectation is the declared `max_tokens`, or with `predict` the tenant's running mean
    of finished lengths where that is smaller.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        ageing_tokens_per_s: float = 10.0,
        predict: bool = False,
        memory: float = 0.9,
    ) -> None:
        super().__init__(config)
        within(0, 1e9, ageing_tokens_per_s=ageing_tokens_per_s)
        within(0, 1, memory=memory)
        self.ageing_tokens_per_s = ageing_tokens_per_s
        self.predict = self.follows_service = predict
        self.memory = memory  # weight of earlier lengths in the running mean
        self.means: dict[str, float] = {}

    def value(self, state: RequestState) -> float:
        request = state.request
        expected = float(request.sampling.max_tokens - len(request.output))
        if self.predict and request.tenant in self.means:
            expected = min(expected, self.means[request.tenant])
        return expected + request.counts_from_s * self.ageing_tokens_per_s

    def finish(self, state: RequestState) -> None:
        tenant, length = state.request.tenant, float(state.num_output_tokens)
        mean = self.means.pop(tenant, length)
        if len(self.means) >= _MAX_NAMES:  # clients choose the names: drop the least recent
            del self.means[next(iter(self.means))]
        self.means[tenant] = self.memory * mean + (1 - self.memory) * length
