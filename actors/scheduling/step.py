"""The step under construction: the calls of a policy, and the resulting plan.

A policy uses only the `StepBuilder`: it calls `decode_all`, `decode`, `chunk`, `start` and
`preempt`, each of which allocates what it needs or changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.scheduling.microbatch import decode_share, spread
from actors.scheduling.plan import Slice
from actors.scheduling.state import Drafted, RequestState, RequestStatus
from actors.scheduling.step_contents import StepContents

_make = tuple.__new__  # a NamedTuple without the Python-level constructor: once per token


class StepBuilder(StepContents):
    """The step under construction. Attributes are for reading; methods add work."""

    def decode_all(self) -> None:
        """Add a token for every request that can decode (this micro-batch's share of them)."""
        if not self._uniform:
            self.decode(self._running.decoding)
            return
        ready = self.runnable_decodes()
        share = decode_share(self._requests, self.config.depth)
        self.decode(spread(ready, share))
        for state in ready:  # instead of those that wait for memory
            if self.num_decodes >= share:
                return
            self.decode((state,))

    def decode(self, states: Iterable[RequestState]) -> None:
        """Add a token for each of these `decoding` requests that can decode now, best rank first.

        A request is left out if it needs a KV block and not even preempting worse ranks frees one.
        This loop runs once per generated token, so it calls no functions in the usual case.
        """
        step_id, limit = self.step_id, self.config.steps_per_request
        several_stages = self.config.num_stages > 1
        if self._requests.trials:
            states = [s for s in states if (s.suspicion is not None) is self.is_trial]
        if self.num_tokens:  # never twice in one step
            states = [s for s in states if s.step_id != step_id]
        if states is not self._running.decoding:  # growing one may preempt a later one
            states = (s for s in states if s.status is RequestStatus.RUNNING)
        slices, members, context = self._decode_slices, self._decode_states, 0
        before = len(slices)
        for state in states:
            start = state.num_computed_tokens
            if start >= state.end or state.in_flight >= limit:
                continue
            if start >= state.capacity and not self._grow(state, start + 1):
                continue
            if several_stages and start >= state.num_first_stage_tokens:
                self._fed.append((state.request_id, start, state.output_token_ids[-1]))
                state.num_first_stage_tokens = start + 1
            state.num_computed_tokens = start + 1
            state.in_flight += 1
            state.step_id = step_id
            context += start + 1
            slices.append(_make(Slice, (state.request_id, start, 1, True)))
            members.append(state)
        self.decode_context_tokens += context
        added = len(slices) - before
        self.num_decodes += added
        self.num_tokens += added

    def chunk(self, state: RequestState, limit: int) -> int:
        """Add up to `limit` tokens of an admitted prompt; returns how many.

        May be called again for a request that the step already holds.
        """
        if state.status is not RequestStatus.RUNNING:  # preempted earlier in this step
            return 0
        if (state.suspicion is not None) is not self.is_trial:
            return 0
        remaining = state.num_tokens - state.num_computed_tokens
        count = min(remaining, limit, self.room)
        if 0 < count < remaining:
            count = self._round_to_tile(count)
        again = state in self._prefills
        if count <= 0 or (state.in_flight >= self.config.chunks_per_request and not again):
            return 0
        if state.num_computed_tokens + count > state.capacity:
            count = self._make_room(state, count)
            if count <= 0:
                return 0
        self._add(state, count, again)
        return count

    def _round_to_tile(self, count: int) -> int:
        """Cut a chunk so that the step fills whole tiles of the matrix kernels, if possible."""
        excess = (self.num_tokens + count) % self.config.tile
        return count - excess if count > excess else count

    def _make_room(self, state: RequestState, count: int) -> int:
        """Allocate blocks for a chunk; if there are too few, returns what fits without new ones."""
        if self._grow(state, state.num_computed_tokens + count):
            return count
        size = self.config.block_size
        fits = (
            state.capacity - state.num_computed_tokens + self._running.block_manager.num_free * size
        )
        count = min(count, fits)
        if count > 0 and state.num_computed_tokens + count > state.capacity:
            self._grow(state, state.num_computed_tokens + count)
        return count

    def start(self, state: RequestState, limit: int, *, whole: bool = False) -> int:
        """Start the request that `head` returned with a first chunk; 0 if it must wait.

        whole: the whole prompt or nothing, unless it exceeds the stages' buffers.
        """
        limit = min(limit, self.room)
        if limit <= 0 or (whole and limit < min(state.remaining, self.config.max_step_tokens)):
            return 0
        requests = self._requests
        if self._running.num_slots_taken > 0 and not (
            self.admission.may_start(state, requests) and self.budget.may_start(requests)
        ):
            return 0
        if not self._requests.start(state, limit, self.reserve):
            return 0
        return self.chunk(state, limit)

    def preempt(self, state: RequestState) -> None:
        """Preempt a running request (not one that is already in the step)."""
        if state.step_id != self.step_id and state.status is RequestStatus.RUNNING:
            self._requests.preempt(state)

    def room_for_drafts(self) -> int:
        """Drafts that budget and buffers allow in addition."""
        return max(0, min(self.budget.room_for_drafts(self.shape), self.room))

    def add_drafts(self, state: RequestState, drafts: tuple[int, ...]) -> int:
        """Add drafts to one of `decodes_alone`; returns how many got memory.

        Drafts preempt nothing, and take no block that a request waits for.
        """
        running, num_blocks = self._running, len(state.block_table)
        start = state.num_computed_tokens - 1
        need = -(-(start + 1 + len(drafts)) // self.config.block_size) - num_blocks
        if need > 0 and running.claimant is None and running.block_manager.can_allocate(need):
            self._grow(state, start + 1 + len(drafts))
        drafts = drafts[: state.capacity - start - 1]
        count = len(drafts)
        if not count:
            return 0
        at = self._decode_states.index(state)
        del self._decode_states[at], self._decode_slices[at]
        self.num_decodes -= 1
        self.decode_context_tokens -= start + 1
        self.num_tokens += count
        state.num_computed_tokens += count
        state.num_drafts = count
        state.slow_path_at = 0  # its answer takes the slow path
        self._drafted[state] = Drafted(state, count, num_blocks)
        self._drafts.append((state.request_id, drafts))
        return count

    def rerank(self) -> None:
        """Let the order change the ranks of running requests by the service they got."""
        if self._requests.waiting.order.rerank([*self.decoding, *self.prefilling], self.now_s):
            self._running.resort()

    def _grow(self, state: RequestState, num_tokens: int) -> bool:
        fresh = self._requests.grow(state, num_tokens, self.step_id)
        if fresh is None:
            return False
        if state.was_trimmed:
            state.was_trimmed = False
            self._trimmed.append((state.request_id, len(state.block_table) - len(fresh)))
        if state.on_stages:
            self._new_blocks.setdefault(state.request_id, []).extend(fresh)
        return True

    def _add(self, state: RequestState, count: int, again: bool) -> None:
        if not again:
            state.in_flight += 1
            state.step_id = self.step_id
            if state.first_planned_s is None:
                state.first_planned_s = self._requests.now_s
            if not state.on_stages:
                self._starting.append(state)
                state.num_first_stage_tokens = state.num_tokens
        self._prefills[state] = self._prefills.get(state, 0) + count
        state.num_computed_tokens += count
        self.num_tokens += count
        if state.num_computed_tokens == state.num_tokens:
            self._running.to_decoding(state)
