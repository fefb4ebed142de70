"""One step being planned: what a policy may do, and the plan that comes of it.

A policy sees nothing but the `StepBuilder`: it calls `decode_all`, `decode`, `chunk`, `start` and
`preempt`, each of which allocates what it needs or changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actors.scheduling.interfaces import Admission, TokenBudget
from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.microbatch import decode_share, prefill_share, spread
from actors.scheduling.plan import Slice, StepPlan, StepShape
from actors.scheduling.state import InFlight, RequestState, Status

_make = tuple.__new__  # a NamedTuple without the Python-level constructor: once per token


class StepBuilder:
    """The step under construction. Attributes are for reading; methods add work."""

    def __init__(
        self, requests: LiveRequests, budget: TokenBudget, admission: Admission, reserve: bool
    ) -> None:
        """reserve: the policy wants KV for a request's maximum length before it starts."""
        self._requests = requests
        self._running = requests.running
        self.config = requests.config
        self.budget = budget
        self.admission = admission
        self.reserve = reserve
        self.token_budget = 0  # of the last step that had room for prefill
        self._uniform = self.config.micro_batches == "uniform" and self.config.num_stages > 1
        self.clear(0)

    def clear(self, step_id: int) -> None:
        self.step_id = step_id
        self.num_tokens = 0
        self.num_decodes = 0
        self.decode_context_tokens = 0
        self._decode_slices: list[Slice] = []
        self._decode_states: list[RequestState] = []
        self._prefills: dict[RequestState, int] = {}  # tokens of each, in order of addition
        self._fed: list[tuple[int, int, int]] = []
        self._new_blocks: dict[int, list[int]] = {}
        self._starting: list[RequestState] = []
        self.is_trial = False  # the step holds suspects, and nobody else

    # ---- what a policy reads ----------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self._requests.now_s

    @property
    def empty(self) -> bool:
        return self.num_tokens == 0

    @property
    def shape(self) -> StepShape:
        prefills: tuple[tuple[int, int], ...] = ()
        if self._prefills:
            prefills = tuple([(s.num_computed_tokens - n, n) for s, n in self._prefills.items()])
        return _make(StepShape, (self.num_decodes, self.decode_context_tokens, prefills))

    @property
    def room(self) -> int:
        """Tokens that the stages' buffers still hold."""
        return self.config.max_step_tokens - self.num_tokens

    @property
    def decoding(self) -> Sequence[RequestState]:
        """Running requests whose prompt is planned to its end, best rank first."""
        return self._running.decoding

    @property
    def prefilling(self) -> Sequence[RequestState]:
        """Running requests with prompt (or recomputation) left, best rank first."""
        return self._running.prefilling

    @property
    def num_running(self) -> int:
        return self._running.num_requests

    @property
    def num_slots_taken(self) -> int:
        """Sequence slots in use, those of FINISHING requests included."""
        return self._running.num_slots_taken

    @property
    def order_preempts(self) -> bool:
        """Whether the head of the queue may take the slot of a running request."""
        return self._requests.waiting.order.preempts

    @property
    def wants_prefill(self) -> bool:
        """Whether any prompt, running or waiting, has tokens left."""
        return bool(self._running.prefilling or self._requests.waiting.num_requests)

    def tokens_left(self) -> int:
        """Prefill tokens that the budget allows on top of what is in the step. Never negative."""
        budget = self.budget.num_tokens(self.shape, self._requests)
        if self._uniform:
            share = prefill_share(self._requests, self.config.depth, self.num_tokens)
            budget = min(budget, share)
        self.token_budget = budget
        return max(0, min(budget - self.num_tokens, self.room))

    def runnable_prefills(self) -> list[RequestState]:
        """Admitted requests with known tokens left, best rank first (those of this step too)."""
        limit, step_id = self.config.chunks_per_request, self.step_id
        trusted = [s for s in self._running.prefilling if s.suspicion is None]
        return [s for s in trusted if s.in_flight < limit or s.step_id == step_id]

    def runnable_decodes(self) -> list[RequestState]:
        limit = self.config.steps_per_request
        return [
            s
            for s in self._running.decoding
            if s.in_flight < limit and s.num_computed_tokens < s.end and s.suspicion is None
        ]

    def head(self) -> RequestState | None:
        """The next waiting request."""
        return self._requests.waiting.head(self._requests.now_s)

    # ---- what a policy does -----------------------------------------------------------

    def decode_all(self) -> None:
        """One token for every request that can decode (this micro-batch's share of them)."""
        if not self._uniform:
            self.decode(self._running.decoding)
            return
        ready = self.runnable_decodes()
        share = decode_share(self._requests, self.config.depth)
        self.decode(spread(ready, share))
        for state in ready:  # in place of those that had to wait for memory
            if self.num_decodes >= share:
                return
            self.decode((state,))

    def decode(self, states: Iterable[RequestState]) -> None:
        """One token for each of these `decoding` requests that can decode now, best rank first.

        One that needs a KV block that cannot be had, even by preempting worse ranks, is left out.
        This loop runs once per generated token: it is kept flat on purpose.
        """
        step_id, limit = self.step_id, self.config.steps_per_request
        several_stages = self.config.num_stages > 1
        if self._requests.trials:
            states = [s for s in states if (s.suspicion is not None) is self.is_trial]
        if self.num_tokens:  # never twice in one step
            states = [s for s in states if s.step_id != step_id]
        if states is not self._running.decoding:  # growing one may preempt a later one
            states = (s for s in states if s.status is Status.RUNNING)
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
        """Up to `limit` more tokens of an admitted prompt; returns how many were added.

        May be called again for a request that the step already holds.
        """
        if state.status is not Status.RUNNING:  # preempted for an earlier one of this step
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
        """Cut a chunk so that the step fills whole tiles of the matrix kernels, if it can."""
        excess = (self.num_tokens + count) % self.config.tile
        return count - excess if count > excess else count

    def _make_room(self, state: RequestState, count: int) -> int:
        """Blocks for a chunk; what fits without them if there are too few."""
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

        whole: its prompt or nothing, unless the stages' buffers could never hold it.
        """
        limit = min(limit, self.room)
        if limit <= 0 or (whole and limit < min(state.remaining, self.config.max_step_tokens)):
            return 0
        busy = self._running.num_slots_taken > 0
        if busy and not self.admission.may_start(state, self._requests):
            return 0
        if not self._requests.start(state, limit, self.reserve):
            return 0
        return self.chunk(state, limit)

    def preempt(self, state: RequestState) -> None:
        """Send a running request back to the queue (not one that the step already holds)."""
        if state.step_id != self.step_id and state.status is Status.RUNNING:
            self._requests.preempt(state)

    def rerank(self) -> None:
        """Let the order change the ranks of running requests by what they have been served."""
        if self._requests.waiting.order.rerank([*self.decoding, *self.prefilling], self.now_s):
            self._running.resort()

    def _grow(self, state: RequestState, num_tokens: int) -> bool:
        fresh = self._requests.grow(state, num_tokens, self.step_id)
        if fresh is None:
            return False
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

    # ---- the result -------------------------------------------------------------------

    def build(self) -> InFlight | None:
        """The plan, if there is work in it. Pending releases and copies travel with it."""
        if self.num_tokens == 0:
            return None
        running, swap = self._running, self._running.swap
        slices: list[Slice] = self._decode_slices
        sampled, partial = self._decode_states, []
        shape = self.shape
        for state, count in self._prefills.items():
            end = state.num_computed_tokens
            samples = end == state.num_tokens and state.request.pooling is None
            slices.append(Slice(state.request_id, end - count, count, samples))
            if samples:
                sampled.append(state)
            else:
                partial.append((state, end))
        for state in self._starting:
            state.on_stages = True
        plan = StepPlan(
            step_id=self.step_id,
            slices=tuple(slices),
            released=tuple(running.released),
            swap_out=tuple(swap.swap_out),
            swap_in=tuple(swap.swap_in),
            copies=tuple(running.copies),
            started=tuple([state.introduce() for state in self._starting]),
            new_blocks=tuple([(i, tuple(blocks)) for i, blocks in self._new_blocks.items()]),
            fed=tuple(self._fed),
        )
        step = InFlight(
            plan,
            sampled,
            partial,
            shape,
            self.num_tokens,
            [source for source, _ in running.copies],
            swap.returned if swap.is_pending else (),
            swap.swapped_out if swap.is_pending else (),
            self._requests.now_s,
        )
        running.released, running.copies = [], []
        if swap.is_pending:
            swap.clear()
        return step
