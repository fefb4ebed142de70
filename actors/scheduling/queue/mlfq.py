"""The queue of a skip-join multi-level feedback queue (FastServe, section 4.1).

Level k may use quantum_tokens * 2**k tokens before it is demoted. A new request skips the levels
whose quantum its prompt would exceed anyway, so a long prompt does not block short ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.queue.waiting import FEW, HeapOrder
from actors.scheduling.registry import within
from actors.scheduling.state import RequestState, RequestStatus


class FeedbackLevels(HeapOrder):
    """promote_s: a request that waits longer goes to the top level, which bounds waiting.

    Levels of background requests come after all of live ones. A promotion takes them that much
    longer as live requests may come later than they, and puts them among the live ones."""

    preempts = True

    def __init__(
        self,
        config: SchedulerConfig,
        num_levels: int = 6,
        quantum_tokens: int = 128,
        promote_s: float = 10.0,
    ) -> None:
        super().__init__(config)
        within(1, 64, num_levels=num_levels)
        within(1, 1e9, quantum_tokens=quantum_tokens)
        within(0, 1e9, promote_s=promote_s)
        self.num_levels = num_levels
        self.quantum_tokens = quantum_tokens
        self.promote_s = promote_s
        # (when it is promoted, entry number, request)
        self._promotions: list[tuple[float, int, RequestState]] = []
        self._most_promotions = FEW  # before those that wait no longer are dropped

    def quantum(self, level: int) -> int:
        """Tokens that a request may be served at this level."""
        return self.quantum_tokens << level

    def join_level(self, num_tokens: int) -> int:
        """The highest level whose quantum covers a prompt of this length."""
        level = 0
        while level < self.num_levels - 1 and self.quantum(level) < num_tokens:
            level += 1
        return level

    def set_level(self, state: RequestState, level: int) -> None:
        """Move to a level with a fresh quantum; the caller re-sorts what it keeps."""
        state.level = level
        state.served = 0
        offset = self.num_levels if state.is_background else 0
        state.order_key = (float(level + offset), state.sequence_number)

    def promote(self, state: RequestState) -> None:
        self.set_level(state, 0)
        state.order_key = (0.0, state.sequence_number)

    def patience_s(self, state: RequestState) -> float:
        """How long it may wait for its start, or between two tokens."""
        return self.promote_s + state.request.counts_from_s - state.request.arrival_s

    def rerank(self, running: Iterable[RequestState], now_s: float) -> bool:
        """Move a request that has used up its quantum one level down, a starved one to the top."""
        changed = False
        for state in running:
            last_s = state.last_token_s
            if (
                last_s is not None
                and state.order_key[0]
                and now_s - last_s > self.patience_s(state)
            ):
                self.promote(state)
                changed = True
            elif state.served >= self.quantum(state.level) and state.level < self.num_levels - 1:
                self.set_level(state, state.level + 1)
                changed = True
        return changed

    def charge(self, num_tokens: Mapping[RequestState, int]) -> None:
        for state, count in num_tokens.items():
            state.served += count

    def adopt(self, state: RequestState) -> None:
        self.set_level(state, self.join_level(state.remaining))

    def push(self, state: RequestState, now_s: float) -> None:
        super().push(state, now_s)
        self._await_promotion(state, now_s)

    def restore(self, state: RequestState, now_s: float) -> None:
        super().restore(state, now_s)
        self._await_promotion(state, now_s)

    def _await_promotion(self, state: RequestState, now_s: float) -> None:
        if len(self._promotions) >= self._most_promotions:  # most have started or ended
            waits = RequestStatus.WAITING
            self._promotions = [one for one in self._promotions if one[2].status is waits]
            heapq.heapify(self._promotions)
            self._most_promotions = 2 * len(self._promotions) + FEW
        heapq.heappush(self._promotions, (now_s + self.patience_s(state), self._num_entries, state))

    def peek(self, now_s: float) -> RequestState | None:
        promotions = self._promotions
        while promotions and promotions[0][0] < now_s:
            state = heapq.heappop(promotions)[2]
            if state.status is RequestStatus.WAITING and state.order_key[0] > 0:
                self.promote(state)
                if state in self._entry_of:  # else it is set aside, and enters when it is put back
                    self._enter(state)
        return super().peek(now_s)

    def drain(self) -> list[RequestState]:
        self._promotions.clear()
        return super().drain()
