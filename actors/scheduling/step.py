"""The step under construction: the calls of a policy. Its reads are those of `ReadableStep`.

A policy uses only the `StepBuilder`. It calls `decode_all`, `decode`, `chunk`, `start`, `preempt`
and, if it preempts by order, `charge` and `rerank`; each allocates what it needs or changes
nothing. What the step holds so far is in `contents`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from actors.scheduling.class_view import ClassView
from actors.scheduling.interfaces import EngineView
from actors.scheduling.microbatch import decode_share, spread, within
from actors.scheduling.readable_step import ReadableStep
from actors.scheduling.state import Drafted, InFlight, RequestState, RequestStatus


class StepBuilder(ReadableStep):
    """Builds one step after the other. Attributes are for reading; methods add work."""

    def build(self) -> InFlight | None:
        """The plan, if it has work."""
        if self.contents.is_empty:
            return None
        adapter_load_s = 0.0
        if self._requests.num_adapter_loads:
            adapter_load_s = self.budget.room_for_adapter_loads_s(self.shape)
        return self.contents.build(self._requests, self._beside_move, adapter_load_s)

    def narrow(self, is_background: bool | None) -> None:
        """From now on the step takes, and other reads than `decoding` and `prefilling` tell of,
        background requests alone, or live ones alone; None: all again."""
        requests = self._requests
        self._view = requests if is_background is None else ClassView(requests, is_background)

    def head(self) -> RequestState | None:
        """The next waiting request; requests that wait for a fetch are set aside."""
        if self._tier is not None:
            self._tier.fetch_ahead()
        return self._view.head()

    def decode_all(self, most: int | None = None) -> None:
        """Add a token for every request that can decode (this micro-batch's share of them), or for
        the `most` that have waited longest."""
        if not self._uniform and most is None:
            self.decode(self._view.decoding)
            return
        ready = self.runnable_decodes()
        share = decode_share(self._view, self.config.depth) if self._uniform else len(ready)
        if most is not None:
            share = min(share, within(ready, most))
        before = self.contents.num_streams
        self.decode(spread(ready, share))
        for state in ready:  # instead of those that wait for memory
            if self.contents.num_streams - before >= share:
                return
            self.decode((state,))

    def decode(self, states: Iterable[RequestState]) -> None:
        """Add a token for each of these `decoding` requests that can decode now, best first.

        A request is left out if it needs a KV block and not even preempting later ones frees one.
        Comes before chunks: the stages' buffers have room for all decodes, whatever follows.
        This loop runs once per generated token, so it calls no functions in the usual case.
        """
        contents, limit = self.contents, self.config.steps_per_request
        step_id = contents.step_id
        several_stages = self.config.num_stages > 1
        if self._requests.trials:
            states = [s for s in states if (s.suspicion is not None) is self.is_trial]
        if contents.num_tokens:  # never twice in one step
            states = [s for s in states if s.step_id != step_id]
        if states is self._running.decoding and self._requests.num_background:
            states = list(states)  # growing one may preempt a background one before it
        if states is not self._running.decoding:
            # The live list cannot hold one that growing another has preempted; a copy can
            states = (s for s in states if s.status is RequestStatus.RUNNING)
        add_slice, add_member = contents.decode_slices.append, contents.decode_states.append
        num_before, context_tokens = len(contents.decode_slices), 0
        full: list[RequestState] = []  # these get their blocks together
        num_free = self._running.block_manager.num_free
        for state in states:
            start = state.num_computed_tokens
            if state.in_flight >= limit:
                continue
            if start >= state.decode_limit:
                if start >= state.end:
                    continue
                if start < state.num_tokens - 1:
                    self._grow_each(full)
                    full = []
                    num_added = len(contents.decode_slices) - num_before
                    self._decode_again(state, self.room - num_added)
                    num_free = self._running.block_manager.num_free
                    continue
                if len(full) < num_free:
                    full.append(state)
                else:
                    self._grow_each(full)
                    full, has_block = [], self._grow(state, start + 1)
                    num_free = self._running.block_manager.num_free
                    if not has_block:
                        continue
            if several_stages and start >= state.num_first_stage_tokens:
                contents.fed.append((state.request_id, start, state.output_token_ids[-1]))
                state.num_first_stage_tokens = start + 1
            state.num_computed_tokens = start + 1
            state.in_flight += 1
            state.step_id = step_id
            add_slice((state.request_id, start, 1, True))
            add_member(state)
            context_tokens += start + 1
        self._grow_each(full)
        contents.added_decodes(len(contents.decode_slices) - num_before, context_tokens)

    def _decode_again(self, state: RequestState, room: int) -> None:
        """A decode that begins where a slice with rejected drafts began, if its tokens fit the room
        and its memory."""
        start, end = state.num_computed_tokens, state.num_tokens
        if end - start > room or (end > state.capacity and not self._grow(state, end)):
            return
        state.use_blocks(state.block_table, self.config.block_size)
        if self.config.num_stages > 1 and end > state.num_first_stage_tokens:
            self.contents.fed.append((state.request_id, end - 1, state.output_token_ids[-1]))
            state.num_first_stage_tokens = end
        state.num_computed_tokens = end
        state.in_flight += 1
        state.step_id = self.contents.step_id
        redone = Drafted(state, 0, len(state.block_table), end - start - 1)
        self.contents.add_redone(redone)

    def chunk(self, state: RequestState, limit: int) -> int:
        """Add up to `limit` tokens of an admitted prompt; returns how many.

        May be called again for a request that the step already holds.
        """
        if state.status is not RequestStatus.RUNNING:  # preempted earlier in this step
            return 0
        if (state.suspicion is not None) is not self.is_trial:
            return 0
        remaining = state.num_tokens - state.num_computed_tokens
        again = state in self.contents.prefills
        count = min(remaining - self._requests.kept_back(remaining, again), limit, self.room)
        if 0 < count < remaining:
            count = self._round_to_tile(count)
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
        excess = (self.contents.num_tokens + count) % self.config.tile
        return count - excess if count > excess else count

    def _make_room(self, state: RequestState, count: int) -> int:
        """Allocate blocks for a chunk; if there are too few, returns what fits without new ones."""
        if self._grow(state, state.num_computed_tokens + count):
            return count
        capacity = self.config.block_size * self._running.block_manager.num_free + state.capacity
        count = min(count, capacity - state.num_computed_tokens)
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
        if not self._may_start(state) or not self._requests.start(state, limit, self.reserve):
            return 0
        return self.chunk(state, limit)

    def _may_start(self, state: RequestState) -> bool:
        """By admission and budget. Of live ones background requests keep none from starting."""
        view = self._view
        if isinstance(view, ClassView) and not view.is_background:
            admitting: EngineView = view
            runs = bool(view.decoding or view.prefilling)
        else:
            admitting, runs = self._requests, self._running.num_slots_taken > 0
        return not runs or (
            self.admission.may_start(state, admitting) and self.budget.may_start(view)
        )

    def preempt(self, state: RequestState) -> None:
        """Preempt a running request (not one that is already in the step)."""
        if state.step_id != self.contents.step_id and state.status is RequestStatus.RUNNING:
            self._requests.preempt(state)

    def room_for_drafts(self) -> int:
        """Drafts that budget and buffers allow in addition."""
        room = min(self.budget.room_for_drafts(self.shape), self.room)
        if self.config.num_saved_states is not None:
            room = min(room, self._room_to_go_back())
        return max(0, room)

    def _room_to_go_back(self) -> int:
        """Drafts that may all be wrong, and a later step still holds every decode: the buffers hold
        what these would then compute again."""
        taken = self.config.most_requests
        for shape in (self.shape, *(step.shape for step in self._requests.in_flight)):
            taken += sum([length - 1 for _, length in shape.prefills[: shape.num_drafted]])
        for state in self._running.decoding:
            if not state.in_flight:
                taken += state.decode_length - 1
        return self.config.max_step_tokens - taken

    def add_drafts(self, state: RequestState, drafts: tuple[int, ...]) -> int:
        """Add drafts to one of `contents.decodes_alone`; returns how many got memory.

        Drafts preempt nothing, and take no block that a request waits for or a prompt will need.
        """
        running, num_blocks = self._running, len(state.block_table)
        start = state.num_computed_tokens - 1
        need = -(-(start + 1 + len(drafts)) // self.config.block_size) - num_blocks
        if need > 0 and running.claimant is None and self._requests.can_spare(need):
            self._grow(state, start + 1 + len(drafts))
        drafts = drafts[: state.capacity - start - 1]
        count = len(drafts)
        if not count:
            return 0
        state.num_computed_tokens += count
        state.num_drafts = count
        state.slow_path_at = 0  # its answer takes the slow path
        num_redone = self.contents.num_redone_of(state)
        self.contents.give_drafts(Drafted(state, count, num_blocks, num_redone), drafts)
        return count

    def charge(self, num_tokens: Mapping[RequestState, int]) -> None:
        """Tell the order how many tokens of each request the step serves."""
        self._requests.waiting.order.charge(num_tokens)

    def rerank(self) -> None:
        """Let the order change the keys of running requests by what they were charged."""
        running, now_s = [*self.decoding, *self.prefilling], self._requests.now_s
        if self._requests.waiting.order.rerank(running, now_s):
            self._running.resort()

    def _grow(self, state: RequestState, num_tokens: int) -> bool:
        fresh = self._requests.grow(state, num_tokens, self.contents.step_id)
        if fresh is None:
            return False
        self.contents.added_blocks(state, fresh)
        return True

    def _grow_each(self, states: Sequence[RequestState]) -> None:
        """Append a block to each table; requires as many free ones."""
        for state, block in zip(states, self._running.append_blocks(states), strict=True):
            self.contents.added_blocks(state, (block,))

    def _add(self, state: RequestState, count: int, again: bool) -> None:
        contents = self.contents
        if not again:
            state.in_flight += 1
            state.step_id = contents.step_id
            if state.first_planned_s is None:
                state.first_planned_s = self._requests.now_s
            if not state.on_stages:
                contents.starting.append(state)
                state.num_first_stage_tokens = state.num_tokens
        contents.prefills[state] = contents.prefills.get(state, 0) + count
        contents.num_tokens += count
        state.num_computed_tokens += count
        if state.num_computed_tokens == state.num_tokens:
            self._running.to_decoding(state)
