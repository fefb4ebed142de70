"""Least slack first, with relegation of requests that are late anyway (Niyama / QoServe).

Slack at time t is (arrival + TTFT objective) - t - (time its prompt needs). All waiting requests
lose slack at the same speed, so their order is constant and a heap suffices.
"""

from __future__ import annotations

import heapq
from collections import deque

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.queue.order import Order
from actors.scheduling.queue.waiting import FEW
from actors.scheduling.registry import within
from actors.scheduling.state import RequestState, RequestStatus

TYPICAL_PROMPT = 512  # tokens, to estimate how fast prompts are computed
_RELEGATED = 1e12  # added to a relegated request's key: after all others


class EarliestDeadline(Order):
    """Requests that can keep their TTFT objective go before those that cannot.

    default_ttft_s: objective of requests without one (default: the deployment's `ttft_s`).
    prefill_tokens_per_s: prefill speed, for the time that a prompt needs (default: predicted by
        the cost model for long steps).
    patience_s: a relegated request goes first after this further wait (no starvation).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        default_ttft_s: float = 60.0,
        prefill_tokens_per_s: float | None = None,
        patience_s: float = 30.0,
    ) -> None:
        within(1e-9, float("inf"), prefill_tokens_per_s=prefill_tokens_per_s)
        within(0, 1e9, default_ttft_s=default_ttft_s, patience_s=patience_s)
        self.default_ttft_s = config.ttft_s if config.ttft_s is not None else default_ttft_s
        self.prefill_tokens_per_s = prefill_tokens_per_s or _predicted_tokens_per_s(config)
        self.patience_s = patience_s
        self._due: list[tuple[tuple[float, int], RequestState]] = []
        self._relegated: deque[tuple[float, RequestState]] = deque()  # (relegated at, request)
        self._pop_relegated = False  # whether the last peek returned a relegated request
        self._num_removed = 0  # some may never come to the front, to be skipped

    def push(self, state: RequestState, now_s: float) -> None:
        self.adopt(state)
        heapq.heappush(self._due, (state.order_key, state))

    def adopt(self, state: RequestState) -> None:
        request = state.request
        ttft_s = request.objective.ttft_s
        deadline_s = request.counts_from_s + (self.default_ttft_s if ttft_s is None else ttft_s)
        latest_start_s = deadline_s - state.remaining / self.prefill_tokens_per_s
        state.order_key = (latest_start_s, state.sequence_number)

    def restore(self, state: RequestState, now_s: float) -> None:
        if state.output_token_ids:  # its next token is due before any first token
            last_s = now_s if state.last_token_s is None else state.last_token_s
            last_s += state.request.counts_from_s - state.request.arrival_s
            state.order_key = (min(state.order_key[0], last_s), state.sequence_number)
        elif state.order_key[0] >= _RELEGATED:
            if not state.admitted:  # its tenant was at its cap: its waiting time counts
                self._relegated.appendleft((state.request.arrival_s, state))
                return
            # Its patience had expired when it started; it stays in front.
            state.order_key = (state.request.counts_from_s, state.sequence_number)
        heapq.heappush(self._due, (state.order_key, state))

    def peek(self, now_s: float) -> RequestState | None:
        self._relegate(now_s)
        relegated = self._relegated
        while relegated and relegated[0][1].status is not RequestStatus.WAITING:
            relegated.popleft()
        overdue = bool(relegated) and now_s - relegated[0][0] > self.patience_s
        self._pop_relegated = overdue or not self._due
        if self._pop_relegated:
            return relegated[0][1] if relegated else None
        return self._due[0][1]

    def _relegate(self, now_s: float) -> None:
        """Relegate waiting requests that cannot keep their TTFT objective.

        Requests with a first token, or relegated and started before, are not judged again.
        """
        due = self._due
        while due:
            order_key, state = due[0]
            if state.status is RequestStatus.WAITING:
                if state.output_token_ids or state.admitted or order_key[0] >= now_s:
                    return
                state.order_key = (_RELEGATED + state.request.arrival_s, state.sequence_number)
                self._relegated.append((now_s, state))
            heapq.heappop(due)

    def pop(self) -> RequestState:
        if self._pop_relegated:
            return self._relegated.popleft()[1]
        return heapq.heappop(self._due)[1]

    def remove(self, state: RequestState) -> None:
        self._num_removed += 1
        if 2 * self._num_removed > len(self._due) + len(self._relegated) + FEW:
            self._num_removed = 0
            self._due = [one for one in self._due if _waits(one[1], state)]
            heapq.heapify(self._due)
            self._relegated = deque(one for one in self._relegated if _waits(one[1], state))

    def drain(self) -> list[RequestState]:
        waiting = [state for _, state in sorted(self._due)]
        waiting += [state for _, state in self._relegated]
        self._due.clear()
        self._relegated.clear()
        return [state for state in waiting if state.status is RequestStatus.WAITING]


def _waits(state: RequestState, removed: RequestState) -> bool:
    return state.status is RequestStatus.WAITING and state is not removed


def _predicted_tokens_per_s(config: SchedulerConfig) -> float:
    """Tokens per second of a step with only prefill; infinite without a cost model."""
    if config.cost_model is None:
        return float("inf")
    model = CostModel.from_dict(config.cost_model)
    num_tokens = min(TYPICAL_PROMPT, config.max_step_tokens)
    mix = Mix()
    mix.add(0, num_tokens, model.attention_window)
    return num_tokens / model.stage_s(mix)
